"""Blocks of a plan: their cells, seeds and ids, and what is refused."""

import re
import shutil

import pytest
import yaml

from analysis.cli import main
from analysis.design import examination, expand, read_plan
from analysis.results.locked import LockedPlan
from lit_klrb.errors import ConfigurationError

POLICY, REFERENCE = "model.init_args.policy_path", "model.init_args.reference_path"
BLOCKS = {
    "a": {"inputs": {POLICY: "dpo-a"}},
    "b": {"inputs": {POLICY: "dpo-b"}},
    "c": {"inputs": {"model.policy_path": "dpo-b"}, "overrides": {"prompts": 4}},
}


@pytest.fixture
def write(desk):
    """Write a plan with blocks."""
    for stage in ("sft", "dpo", "rloo"):
        (desk / f"{stage}.yaml").write_text("{seconds: 0}")

    def write(blocks=BLOCKS, replicates=6, arms=("MonteCarlo", "RaoBlackwell"), rloo=None, **keys):
        inputs = {REFERENCE: "sft"}
        arms = arms if isinstance(arms, dict) else list(arms)
        plan = {
            "name": "blocks",
            "directory": "runs",
            "module": "fake_job",
            "stages": {
                "sft": {"config": "sft.yaml"},
                "dpo-a": {"config": "dpo.yaml", "inputs": inputs},
                "dpo-b": {"config": "dpo.yaml", "inputs": inputs},
                "rloo": {"config": "rloo.yaml", "inputs": {**inputs, POLICY: "dpo-a"}} | (rloo or {}),
            },
            "grid": {"arms": arms, "beta": {0: 0.1, 3: 0.2}, "replicates": replicates}
            | ({} if blocks is None else {"blocks": blocks}),
            "primary": {"control": next(iter(arms))},
        } | keys
        (desk / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
        return desk / "plan.yaml"

    return write


def cells(path):
    return {cell.place or cell.trial or cell.stage: cell for cell in expand(read_plan(path)).cells}


def test_replicate_r_is_in_block_r_mod_b(write):
    found = cells(write())
    (sft, *warm) = (found[stage].id for stage in ("sft", "dpo-a", "dpo-b"))
    for (_, _, replicate), cell in ((place, cell) for place, cell in found.items() if cell.point):
        start = warm[min(replicate % 3, 1)]
        assert cell.needs == (sft, start)
        options = dict(zip(cell.argv[1::2], cell.argv[2::2], strict=True))
        assert options["--model.policy_path"] == f"{{runs}}/cells/{start}/checkpoints/last.ckpt"
        assert len([option for option in options if option.endswith("policy_path")]) == 1
        assert options.get("--prompts") == ("4" if replicate % 3 == 2 else None)
        assert cell.overrides.get("prompts") == (4 if replicate % 3 == 2 else None)


def test_blocks_leave_seeds_pairs_and_the_ids_of_equal_cells_as_they_are(write):
    with_blocks, without = cells(write()), cells(write(None))
    assert {place: cell.seed for place, cell in with_blocks.items()} == {
        place: cell.seed for place, cell in without.items()
    }
    equal = {place for place, cell in with_blocks.items() if cell.id == without[place].id}
    assert {place[2] for place in equal if isinstance(place, tuple)} == {0, 3}
    assert "blocks" not in read_plan(write(None)).record()["grid"]


def test_more_replicates_keep_the_cells(write):
    few, many = cells(write(replicates=3)), cells(write(replicates=6))
    assert {place: cell.id for place, cell in few.items()}.items() <= {
        place: cell.id for place, cell in many.items()
    }.items()


def test_a_class_of_ones_own_that_a_block_names_is_part_of_ids(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rewards.py").write_text("def short(text): return 1")
    path = write(with_third({"model.reward": "own_rewards:short"}))
    before = cells(path)
    (tmp_path / "own_rewards.py").write_text("def short(text): return 2")
    assert {cell.id for cell in before.values()}.isdisjoint(cell.id for cell in cells(path).values())


def test_copies_of_one_warm_start_are_no_blocks(write, tmp_path):
    for name, content in (("one", "a"), ("copy", "a"), ("other", "b")):
        (tmp_path / f"{name}.ckpt").write_text(content)
    blocks = {name: {"overrides": {"model.policy_path": f"{name}.ckpt"}} for name in ("one", "copy", "other")}
    last = {"inputs": {REFERENCE: "sft"}}
    expand(read_plan(write({name: blocks[name] for name in ("one", "other")}, rloo=last)))
    with pytest.raises(ConfigurationError, match="one and copy name files with the same content"):
        expand(read_plan(write(blocks, rloo=last)))


def test_trials_are_in_blocks_too(write):
    tuning = {"rates": [0.1, 0.2, 0.4], "replicates": 3, "key": "lr"}
    found = cells(write(tuning=tuning))
    trials = [cell for cell in found.values() if cell.trial]
    prompts = {cell.trial.replicate: cell.overrides.get("prompts") for cell in trials}
    assert prompts == {0: None, 1: None, 2: 4}
    assert {cell.needs[1] for cell in trials if cell.trial.replicate == 1} == {found["dpo-b"].id}
    with pytest.raises(
        ConfigurationError, match=r"tuning.replicates: 4 is not allowed; a multiple of 3, the"
    ):
        read_plan(write(tuning=tuning | {"replicates": 4}))


def test_the_locked_plan_has_the_blocks_and_the_plan_prints_them(write, capsys, tmp_path):
    assert main(["plan", "--config", str(write())]) == 0
    out = capsys.readouterr().out
    assert "  3 blocks of 2 replicates (a, b, c)\n" in out
    assert "  t test over 3 blocks, level 0.05\npower, no pilot: 80 % for a mean difference in J of " in out
    assert "all runs share one sft and one dpo" not in out
    assert "all runs share one sft: what is found holds given" in out
    assert LockedPlan.read(tmp_path / "runs" / "plan.json").plan.grid == read_plan(write()).grid
    two = {label: BLOCKS[label] for label in "ab"}
    assert main(["plan", "--config", str(write(two, directory="two"))]) == 0
    out = capsys.readouterr().out
    assert "2 blocks of 3 replicates (a, b)\n" in out
    assert "swap test of 12 pairs, level 0.05" in out


def with_third(overrides=None, inputs=None):
    return {**BLOCKS, "c": {"overrides": overrides or {}, "inputs": inputs or {}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicates": 4}, "grid.replicates: 4 is not allowed; a multiple of 3, the number of blocks"),
        ({"blocks": {"a": BLOCKS["a"]}}, "grid.blocks: ['a'] is not allowed; at least two blocks"),
        ({"blocks": {**BLOCKS, "c": BLOCKS["b"]}}, "is not allowed; b is the same"),
        ({"blocks": {"a": {}, " b": {"overrides": {"x": 1}}}}, "grid.blocks: ' b' is not allowed; labels"),
        ({"blocks": with_third(inputs={"x": "rloo"})}, "c.inputs.x: 'rloo' is not allowed; one of: sft"),
        (
            {"blocks": with_third(inputs={"x": "sft"}), "rloo": {"overrides": {"x": 1}}},
            "grid.blocks.c.inputs.x: 'sft' is not allowed; stages.rloo.overrides sets it",
        ),
        ({"blocks": with_third({"seed_everything": 1})}, "c.overrides.seed_everything: 1 is not allowed"),
        ({"blocks": with_third({"model.policy_path": "x"})}, "policy_path: 'x' is not allowed; an input"),
        ({"blocks": with_third({"x": {"by_beta": {0: 1, 3: 2}}})}, "only the values of an arm can differ"),
        ({"blocks": {"a": {"seeds": 1}}}, "blocks.a.seeds: there is no such key; one of: overrides, inputs"),
        ({"tuning": {"rates": [1, 2, 3], "replicates": 3, "key": "prompts"}}, "prompts: 4 is not allowed"),
    ],
)
def test_invalid_blocks_are_refused(write, changes, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        read_plan(write(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("blocks", "arms", "place"),
    [
        (with_third({"x_path": "gone"}), ["MonteCarlo", "RaoBlackwell"], "grid.blocks.c: x_path: gone"),
        (with_third({"x_path": "gone"}), ["MonteCarlo"], "grid.blocks.c: x_path: gone"),
        (BLOCKS, {"one": {"x_path": "gone"}, "two": {}}, "grid.arms.one: x_path: gone"),
        (
            {label: {"overrides": {"x_path": "gone", "y": label}} for label in "ab"},
            ["MonteCarlo", "RaoBlackwell"],
            "stages.rloo: x_path: gone",
        ),
    ],
)
def test_what_would_be_refused_is_refused_when_planning(write, capsys, blocks, arms, place):
    assert main(["plan", "--config", str(write(blocks, arms=arms))]) == 2
    assert capsys.readouterr().err == f"error: {place} does not exist\n"


def test_of_warm_starts_that_differ_in_seeds_one_is_examined(write, monkeypatch):
    ask, asked = examination._ask, []
    monkeypatch.setattr(examination, "_ask", lambda plan, cells: ask(plan, asked.extend(cells) or cells))
    plan = read_plan(write())
    found = expand(plan).cells
    assert examination.examine(plan, found).keys() == {"MonteCarlo", "RaoBlackwell"}
    # Of the arms, those of blocks a and c, as b differs from a in its warm start alone
    assert [cell.stage for cell in asked] == ["sft", "dpo-a", *["rloo"] * 4]
    assert [cell.needs for cell in asked] == [(), *[(found[0].id,)], *[(found[0].id, found[1].id)] * 4]


def test_the_example_of_the_docs_can_be_read(request, monkeypatch, tmp_path):
    root = request.config.rootpath
    text = (root / "docs" / "compare.md").read_text("utf-8")
    (example,) = (block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "blocks:" in block)
    head = "name: x\ndirectory: runs/x\nprimary: {control: MonteCarlo}\n"
    (tmp_path / "plan.yaml").write_text(head + example)
    monkeypatch.chdir(root)
    plan = read_plan(tmp_path / "plan.yaml")
    found = [cell for cell in expand(plan).cells if cell.point]
    assert len({cell.needs for cell in found}) == len(plan.grid.blocks) == 3
    assert plan.starting_points == ["sft"]


def test_the_plan_of_nine_lines_in_the_docs_is_complete(request, monkeypatch, tmp_path):
    root = request.config.rootpath
    text = (root / "docs" / "compare.md").read_text("utf-8")
    plan_text = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]
    assert len(plan_text.splitlines()) == 9
    (tmp_path / "my_plan.yaml").write_text(plan_text)
    (tmp_path / "runs" / "own" / "rloo").mkdir(parents=True)
    shutil.copy(root / "configs" / "demo" / "rloo.yaml", tmp_path / "runs" / "own" / "rloo" / "config.yaml")
    monkeypatch.chdir(tmp_path)
    plan = read_plan(tmp_path / "my_plan.yaml")
    cells = expand(plan).cells
    assert len([cell for cell in cells if cell.point]) == 3 * 8
    assert len([cell for cell in cells if cell.trial]) == 3 * 3 * 4
