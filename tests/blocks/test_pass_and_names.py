"""Families whose weights a forward pass once read otherwise than they are used."""

import pytest

from blockopt import find_blocks
from blockopt.blocks import ROW_ROLES, UnknownBlocksError
from blockopt.blocks.watch import layouts_of_pass
from tests.helpers.expected_blocks import cut
from tests.helpers.tiny_models import batch_of, tiny_transformer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*no role in a transformer", "ignore:.*shows no attention that uses"
)

# Indexers of sparse attention run without gradients; rectified gates shut many units; what Mamba
# selects by is no MLP; a backbone has no head; experts of attention make queries; Zaya adds queries
# to keys, and keys to queries.
FAMILIES = (
    *("deepseek_v32", "glm_moe_dsa", "glm5_next", "bitnet", "olmo_hybrid", "pop2piano"),
    *("falcon_mamba", "glpn", "jetmoe", "zaya", "granite_swa"),
)
MATRICES = {"query", "key", "value", "output", "gate", "mlp_in", "mlp_gate", "mlp_out", "head"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_pass_shows_what_names_say(kind):
    model = tiny_transformer(kind)
    named = find_blocks(model)
    seen = find_blocks(model, example=batch_of(model))  # a warning, if they disagree, is an error
    matrices = {name for name, entry in named.items() if MATRICES & set(entry.roles)}
    assert matrices
    assert {name: seen[name] for name in matrices} == {name: named[name] for name in matrices}


# Drawn at random among those that no other test checks head by head, and that a pass reads as names
# do.
DRAWN = (
    *("wav2vec2", "blenderbot-small", "gte", "siglip_vision_model"),
    *("whisper", "gpt_neo", "bigbird_pegasus", "hubert", "modernbert", "xglm", "flaubert"),
    *("dinov2_with_registers", "distilbert", "mbart", "nomic_bert", "openai-gpt", "granite_swa"),
)
ATTENTION = {"query", "key", "value", "output"}


@pytest.mark.parametrize("kind", DRAWN)
def test_derivatives_of_the_heads_alone_find_what_names_say(kind):
    model = tiny_transformer(kind)
    parameters = dict(model.named_parameters())
    options = {"per_head": True, "per_row": ROW_ROLES}
    seen = layouts_of_pass(model, batch_of(model), **options)
    ran = set(seen.multiplied)  # decoders without an encoder do not run their cross-attention
    found = set()
    for name, entry in find_blocks(model).items():
        parameter = parameters[name]
        if ATTENTION & set(entry.roles) and parameter.ndim > 1 and parameter in ran:
            assert seen.layouts[parameter] == (entry.roles, entry.split), name
            assert entry.split is not None, name
            assert entry.split.num_blocks > 1, name
            found |= set(entry.roles)
    assert found == ATTENTION


def test_a_pass_tells_the_order_of_queries_and_gates_that_names_do_not():
    model = tiny_transformer("axk2", factor=4)
    with pytest.raises(UnknownBlocksError, match="fuses queries and gates") as refused:
        find_blocks(model)
    seen = find_blocks(model, example=batch_of(model))
    assert seen == find_blocks(model, overrides=refused.value.overrides)
    entry = seen["model.layers.1.self_attn.q_gate_proj.weight"]
    assert entry == cut(0, repeat=32, query=(48, 1), gate=(16, 1))._replace(layer=1)


def test_an_indexer_of_sparse_attention_has_queries_keys_and_a_number_for_each_head():
    start = "model.layers.0.self_attn.indexer."
    found = find_blocks(tiny_transformer("deepseek_v32"))
    indexer = {n.removeprefix(start): b for n, b in found.items() if n.startswith(start)}
    assert indexer["wq_b.weight"] == cut(0, query=(1024, 64))._replace(layer=0)
    assert indexer["wk.weight"].roles == ("key",)
    assert indexer["weights_proj.weight"] == cut(0, gate=(64, 64))._replace(layer=0)


def test_experts_of_attention_are_cut_by_expert_and_head():
    found = find_blocks(tiny_transformer("jetmoe"))
    start = "model.layers.1.self_attention.experts."
    query = found[f"{start}input_linear.weight"]
    output = found[f"{start}output_linear.weight"]
    assert (query.roles, output.roles) == (("query",), ("output",))
    assert query.split == cut(1, query=(256, 16)).split._replace(stack=8)
    assert output.split == cut(2, output=(256, 16)).split._replace(stack=8)
