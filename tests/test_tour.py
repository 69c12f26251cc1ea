"""The notebook docs/tour.ipynb runs and prints what is kept in it."""

import contextlib
import io
import json
from pathlib import Path

import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tour.ipynb"


def test_the_notebook_prints_and_draws_what_it_keeps(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    plt.switch_backend("agg")
    namespace = {}
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            exec("".join(cell["source"]), namespace)
        kept = {output["output_type"]: output for output in cell["outputs"]}
        assert stream.getvalue() == "".join(kept.get("stream", {"text": []})["text"])
        drawn = [plt.figure(number) for number in plt.get_fignums()]
        assert bool(drawn) == ("display_data" in kept)
        for figure in drawn:
            figure.draw_without_rendering()
        plt.close("all")
    assert NOTEBOOK.stat().st_size < 300_000
