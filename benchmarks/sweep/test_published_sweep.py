"""The page on the estimator against the published sweep: what it shows is what is predicted now."""

import re
from pathlib import Path
from statistics import median

import pytest

from simpletuner_segckpt.messages.errors import WorkloadError
from sweep.page import chosen, left_out, section, summary
from sweep.predicted import compare_example, kendall
from sweep.published import published, rows

DOCUMENT = Path(__file__).parents[2] / "docs/estimator.md"


WITHIN = {
    "wan2.1-t2v-1.3b-480p-single-gpu.peft-lora+ramtorch": 0.05,
    "sd3.peft-lora": 0.05,
    "z-image-turbo.peft-lora": 0.05,
    "lumina2.peft-lora": 0.05,
    "krea2.peft-lora": 0.05,
    "ltxvideo-0.9.5-t2v.peft-lora": 0.05,
    "pixart.lycoris-lokr": 0.08,
}


@pytest.mark.parametrize("name", published().examples)
def test_the_published_sweep(name):
    """The page is current; and predictions are as near as is claimed."""
    found = compare_example(name)
    assert section(found) in DOCUMENT.read_text("utf-8")
    cells = [cell for cell in found.cells if cell.built_for]
    assert cells
    for cell in cells if name in WITHIN else ():
        assert abs(cell.error) < WITHIN[name], cell.row
    if name in WITHIN:
        assert {cell.row.mode for cell in cells} >= {"none", "layer", "seg2-stride4"}
        assert found.tau > 0.8


def test_the_summary_is_what_the_rows_say():
    text = DOCUMENT.read_text("utf-8")
    pattern = (
        r"^\| bf16\S* \| (none|layer|interval2|seg2-stride4)[^|]*\|.*?([+-]\d+\.\d)% .*\[?(\d*)"
    )
    errors = [
        abs(float(found[2]))
        for found in re.finditer(pattern, text, re.MULTILINE)
        if "[1](#why)" not in found[0] and "-offload" not in found[0]
    ]
    taus = [float(found) for found in re.findall(r"Order of step times: tau (-?\d\.\d+)", text)]
    error = float(re.search(r"median error of the peak is (\d\.\d)%", text)[1])
    assert error < 3
    assert error == pytest.approx(median(errors), abs=0.15)
    tau = float(re.search(r"median over the examples: (\d\.\d+)", text)[1])
    assert tau == pytest.approx(median(taus), abs=0.01)
    assert tau >= 0.8


def test_the_page_says_why():
    text = DOCUMENT.read_text("utf-8")
    assert left_out() in text
    for name in {row.example for row in rows()}:
        assert (name in published().examples) != (name in published().left_out)
        assert name in text


def test_the_sweep_is_whole():
    assert len(rows()) == 888
    assert sum(row.status == "measured" for row in rows()) == 523


def test_an_order_needs_two_different_times():
    assert kendall([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) == pytest.approx(1 / 3)
    assert kendall([(1.0, 1.0), (1.0004, 2.0), (2.0, 3.0)]) == pytest.approx(2 / 6**0.5)  # a tie
    assert kendall([(1.0, 1.0), (1.0, 2.0)]) is None
    assert kendall([]) is None


def test_too_few_cells():
    assert "Too few of these cells" in summary(
        [compare_example(name, "L40S") for name in chosen(["ideogram"])]
    )


def test_an_example_that_is_not_there():
    with pytest.raises(WorkloadError, match="no example is called nosuch"):
        chosen(["nosuch"])
