"""Plots: what is drawn, where, and in which words."""

import subprocess
import sys

import pytest
import torch

from blockopt.analysis import plots
from blockopt.analysis.closed_forms.attention_growth import BlockPart
from blockopt.analysis.spectral.density import SpectralDensity
from blockopt.analysis.taylor import LossDifference
from blockopt.blocks import BlockGroup

SIZES = {"query": 3, "key": 2, "value": 5}


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def saved(ax, path):
    ax.figure.savefig(path / "plot.png")
    return (path / "plot.png").stat().st_size > 5_000


def test_roles_keep_their_colours():
    assert len(set(plots.COLORS.values())) == len(plots.COLORS)
    assert plots.role_color("value") == plots.COLORS["value"]
    assert plots.role_color(BlockPart("outer", "value", "query")) == plots.COLORS["value"]
    fused = BlockGroup("value", 0, "layers.0.attention.query_key_value.weight")
    assert plots.role_color(fused) == plots.COLORS["value"]
    assert plots.role_color(BlockGroup("norm", 0), 2) == plots.OTHER_COLORS[2]
    assert plots.role_color("depth 2", 2) == plots.OTHER_COLORS[2]
    assert plots.role_color("no role is read out of query_key", 3) == plots.OTHER_COLORS[3]


def test_heat_map_names_its_blocks(tmp_path):
    matrix = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    ax = plots.hessian_heatmap(matrix, SIZES, title="seen")
    assert [t.get_text() for t in ax.get_xticklabels()] == list(SIZES)
    assert [t.get_position()[1] for t in ax.get_yticklabels()] == [1.5, 4.0, 7.5]
    assert sorted(
        {line.get_ydata()[0] for line in ax.get_lines() if len(set(line.get_ydata())) == 1}
    ) == [3, 5]
    assert ax.get_title() == "seen"
    shown = torch.tensor(ax.get_images()[0].get_array().filled())
    torch.testing.assert_close(shown, matrix.abs().double())
    assert saved(ax, tmp_path)


def test_heads_are_drawn_by_layer_with_a_colour_bar(tmp_path):
    heads = {
        BlockGroup("query", 2 * layer, "w", head): 10.0**layer
        for layer in range(2)
        for head in range(3)
    }
    heads[BlockGroup("query", 2, "w", 1)] = -1.0
    ax = plots.head_heatmap(heads)
    shown = torch.tensor(ax.get_images()[0].get_array().filled(torch.nan))
    expected = torch.tensor([[1.0, 1, 1], [10, torch.nan, 10]], dtype=torch.float64)
    torch.testing.assert_close(shown, expected, equal_nan=True)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "2"]
    assert len(ax.figure.axes) == 2
    assert saved(ax, tmp_path)
    with pytest.raises(ValueError, match="labelled by layer and head"):
        plots.head_heatmap({"query": 1.0})


def test_large_heat_maps_show_root_mean_squares():
    n = 2 * plots.MAX_PIXELS
    matrix = torch.ones(n, n)
    matrix[0, :2] = 0
    ax = plots.hessian_heatmap(matrix, {"query": n})
    shown = ax.get_images()[0].get_array()
    assert shown.shape == (plots.MAX_PIXELS, plots.MAX_PIXELS)
    assert float(shown[0, 0]) == pytest.approx(0.5**0.5)
    assert float(shown[5, 5]) == 1.0
    assert "2 x 2" in ax.figure.axes[1].get_ylabel()


def test_heat_map_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match=r"Must be \(10, 10\)"):
        plots.hessian_heatmap(torch.ones(9, 9), SIZES)
    with pytest.raises(ValueError, match="other than 0"):
        plots.hessian_heatmap(torch.zeros(10, 10), SIZES)
    with pytest.raises(ValueError, match="must be finite"):
        plots.hessian_heatmap(torch.full((10, 10), torch.nan), SIZES)


def test_histograms_tell_medians_and_zeros(tmp_path):
    entries = {
        "query": torch.tensor([1e-6, -1e-5, 1e-4]),
        "value": torch.tensor([0.0, 0.1, 0.1, -0.2]),
    }
    ax = plots.entry_histograms(entries)
    assert legend(ax) == ["query: median 1.0e-05", "value: median 1.0e-01, 25% zero"]
    assert ax.get_xscale() == "log"
    assert sorted(line.get_xdata()[0] for line in ax.get_lines()) == pytest.approx([1e-5, 0.1])
    assert saved(ax, tmp_path)
    with pytest.raises(ValueError, match="must be finite"):
        plots.entry_histograms({"query": torch.zeros(3)})


@pytest.mark.parametrize("logarithmic", [True, False])
def test_growth_tells_fitted_and_predicted_exponents(logarithmic, tmp_path):
    scales = torch.tensor([0.1, 0.2, 0.5, 2.0])
    query, value = BlockPart("full", "query"), BlockPart("outer", "value")
    norms = {
        query: torch.stack([scales**5, 3 * scales**5]),
        value: scales**2,
        "zero": torch.zeros(4),
    }
    ax = plots.growth_lines(scales, norms, {query: 5, value: 3}, logarithmic=logarithmic)
    styles = {(line.get_color(), line.get_linestyle()) for line in ax.get_lines()}
    assert {(plots.COLORS["query"], "-"), (plots.COLORS["value"], "--")} <= styles
    assert legend(ax) == [
        "full query: σ^5.00 ± 0.00, predicted 5",
        "outer value: σ^2.00, predicted 3",
    ]
    assert ax.get_yscale() == ("log" if logarithmic else "linear")
    dashed = [line for line in ax.get_lines() if line.get_color() == "#777777"]
    drawn = torch.tensor(dashed[0].get_ydata())
    # On the measured line
    torch.testing.assert_close(drawn, 2 * scales.double() ** 5, rtol=1e-5, atol=0)
    slope = torch.tensor(dashed[1].get_ydata()).log().diff() / scales.double().log().diff()
    torch.testing.assert_close(slope, torch.full_like(slope, 3.0), rtol=1e-5, atol=0)
    assert saved(ax, tmp_path)


def test_spectra_on_symmetric_logarithmic_axes(tmp_path):
    eigenvalues = {
        "b = 0": torch.tensor([-3.0, 0.0, 1e-3, 20.0]),
        "b = 1": torch.linspace(-1, 1, 50),
    }
    ax = plots.sorted_eigenvalues(eigenvalues)
    assert legend(ax) == ["b = 0: -3 to 20", "b = 1: -1 to 1"]
    assert ax.get_yscale() == "symlog"
    assert list(ax.get_lines()[0].get_ydata()) == pytest.approx([20.0, 1e-3, 0.0, -3.0])
    assert 3 <= len(ax.get_yticks()) <= 5
    assert saved(ax, tmp_path)


def test_density_has_its_peaks_at_the_eigenvalues(tmp_path):
    density = SpectralDensity(
        torch.tensor([-2.0, 5.0]).double(), torch.tensor([0.25, 0.75]).double()
    )
    ax = plots.spectral_densities(
        {"query": density, "value": torch.tensor([1.0, 1.0, -1.0])}, threshold=1e-3
    )
    assert ax.get_xscale() == "symlog"
    assert legend(ax) == ["query: -2 to 5", "value: -1 to 1"]
    x, y = (torch.as_tensor(values) for values in ax.get_lines()[0].get_data())
    assert float(x[y.argmax()]) == pytest.approx(5.0, rel=0.1)
    negative = x < 0
    assert float(x[negative][y[negative].argmax()]) == pytest.approx(-2.0, rel=0.1)
    assert saved(ax, tmp_path)


def test_block_masses_are_written_as_shares(tmp_path):
    ax = plots.block_mass_heatmap(["query", "value"], torch.tensor([[1.0, 0.0], [0.0, 199.0]]))
    # 99.5 % to two digits
    assert [text.get_text() for text in ax.texts] == [
        "0.5",
        "0",
        "0",
        "100",
    ]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["query", "value"]
    assert saved(ax, tmp_path)
    with pytest.raises(ValueError, match="Must be one row and one column per label"):
        plots.block_mass_heatmap(["query"], torch.ones(2, 2))


def test_bars_of_loss_differences(tmp_path):
    one = torch.tensor([-1.0, -2.0])
    found = LossDifference(
        9.0, -2.5, -3.0, -2.6, ("query", "value"), one, one - 0.5, one + 0.1, one, torch.eye(2)
    )
    ax = plots.loss_difference_bars(found)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["query", "value", "jointly"]
    assert legend(ax) == ["first order", "second order", "actual"]
    assert [bar.get_height() for bar in ax.patches] == pytest.approx(
        [-1.5, -2.5, -3.0, -0.9, -1.9, -2.6, -1.0, -2.0, -2.5]
    )
    assert saved(ax, tmp_path)


def test_draws_on_the_axis_that_is_given():
    from matplotlib.figure import Figure

    axes = Figure().subplots(1, 2)
    assert plots.block_mass_heatmap(["a"], torch.ones(1, 1), ax=axes[1]) is axes[1]
    assert not axes[0].get_images()


def test_nothing_global_changes():
    import matplotlib
    from matplotlib import pyplot

    before = dict(matplotlib.rcParams)
    plots.hessian_heatmap(torch.ones(10, 10), SIZES)
    plots.spectral_densities({"query": torch.tensor([1.0, -1.0])})
    assert dict(matplotlib.rcParams) == before
    assert pyplot.get_fignums() == []


def test_importing_the_analysis_and_its_plots_is_light():
    use = "import blockopt.analysis, blockopt.cli; from blockopt.analysis import plots"
    heavy = "{'torch._dynamo', 'matplotlib', 'transformers', 'rich'}"
    code = f"import sys; {use}; plots.role_color('query'); print(*{heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=120, capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


def test_missing_matplotlib_is_told_kindly(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'blockopt\[recipes\]'"):
        plots.block_mass_heatmap(["a"], torch.ones(1, 1))
