"""The plan file, its checks, and the cells and seeds it expands to."""

import itertools
import json

import pytest
import yaml

from analysis.design import expand, read_plan
from analysis.design.cells import cell_seed
from analysis.results import Plan
from lit_klrb.errors import ConfigurationError

PLAN = """
name: small
directory: runs/small
module: lit_klrb.schema
stages:
  sft: {config: sft.yaml}
  dpo: {config: dpo.yaml, inputs: {model.init_args.reference_path: sft}}
  rloo: {config: rloo.yaml, inputs: {model.init_args.reference_path: sft, model.init_args.policy_path: dpo}}
grid: {arms: [MonteCarlo, RaoBlackwell], beta: {0: 0.1, 1: 0.3}, replicates: 2}
primary: {control: MonteCarlo}
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Read the small plan after changing its text."""
    monkeypatch.chdir(tmp_path)
    for stage in ("sft", "dpo", "rloo"):
        (tmp_path / f"{stage}.yaml").write_text(yaml.safe_dump({"trainer": {"max_steps": 3}, "model": {}}))

    def plan(*changes):
        text = PLAN
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        return read_plan(path)

    return plan


def by_point(plan):
    return {cell.point or cell.stage: cell for cell in expand(plan).cells}


def test_no_file_of_a_sweep_has_a_value_of_the_environment(plan, tmp_path, monkeypatch):
    """Ids depend on it all the same, and cells read it again."""
    sft = {
        "model": {"rate": "${oc.env:RATE}", "half": "${model.rate}/${n}"},
        "data": {"source": "${oc.env:ROWS}"},
    }
    sft["n"] = 2
    sft["trainer"] = {"logger": {"api_key": "${oc.env:KEY}"}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(sft))
    (tmp_path / "rows.txt").write_text("a row")
    ids = []
    for rate, key in ((0.125, "f00d"), (0.125, "feed"), (0.25, "feed")):
        for name, value in {"RATE": f"{rate}", "KEY": key, "ROWS": str(tmp_path / "rows.txt")}.items():
            monkeypatch.setenv(name, value)
        expansion = expand(plan())
        assert not any(text in json.dumps(expansion.content) for text in ("0.125", "f00d", "rows.txt"))
        assert expansion.cells[0].config["model"] == {"rate": "${oc.env:RATE}", "half": "${oc.env:RATE}/2"}
        ids.append(expansion.cells[0].id)
    assert ids[0] == ids[1] != ids[2]


def test_passwords_and_the_environment_have_no_place_in_what_is_copied(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    found = plan(("directory: runs/small", "directory: '${oc.env:SCRATCH}/${name}'"))
    assert found.directory == f"{tmp_path}/small"
    with pytest.raises(ConfigurationError, match=r"plan\.yaml: name: \$\{oc\.env:SCRATCH\} is read in conf"):
        plan(("name: small", "name: '${oc.env:SCRATCH}'"))
    (tmp_path / "dpo.yaml").write_text("trainer: {logger: {init_args: {api_key: f00d}}}")
    with pytest.raises(ConfigurationError, match=r"dpo: trainer\.logger\.init_args\.api_key: cells have"):
        expand(plan())


ARMS, BETAS, CONTROL = "[MonteCarlo, RaoBlackwell]", "{0: 0.1, 1: 0.3}", "control: MonteCarlo"
SFT, RLOO = "{config: sft.yaml}", PLAN[PLAN.index("{config: rloo") : PLAN.index("\ngrid")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replicates: 2", "replicates: 0", "grid.replicates: 0 is not allowed; integers from 1 to 250000"),
        ("replicates: 2", "replicate: 2", "grid.replicate: there is no such key; one of: arms, beta, repl"),
        (f", beta: {BETAS}", "", "grid.beta: is missing"),
        (BETAS, "[0.1, 0.1]", "beta.1: 0.1 is not allowed; 0 is the same"),
        (BETAS, "{0: -0.1}", "grid.beta.0: -0.1 is not allowed; greater than or equal to 0"),
        (ARMS, "MonteCarlo", "grid.arms: .MonteCarlo. is not allowed; a valid dict"),
        (CONTROL, "control: NoKL", "primary.control: 'NoKL' .* one of: MonteCarlo, RaoBlackwell"),
        (CONTROL, f"{CONTROL}, alpha: 0.9", "primary.alpha: 0.9 is not allowed"),
        (CONTROL, f"{CONTROL}, margins: {{objective: 0}}", "margins.objective: 0 is not allowed; greater"),
        ("policy_path: dpo", "policy_path: rloo", "inputs.*policy_path: 'rloo' .* a stage above: sft, dpo"),
        (SFT, "{config: sft.yaml, command: test}", "sft.command: 'test' is not allowed; 'fit' or 'study'"),
        (SFT, "{config: sft.yaml, command: study}", "dpo.inputs.*: 'sft' .* a stage above: there is none"),
        ("dpo.yaml, ", "dpo.yaml, command: study, ", "dpo.inputs: .* a study takes no checkpoint"),
        (RLOO, "{config: rloo.yaml, command: study}", "rloo.command: 'study' .* cannot be the last stage"),
        ("name: small", "name: small\nthreads: 0", "threads: 0 is not allowed"),
        ("name: small", "name: [", "expected"),
        (
            "config: dpo.yaml,",
            "config: dpo.yaml, overrides: {model.init_args.reference_path: x},",
            "stages.dpo.overrides.model.reference_path: 'x'",
        ),
        ("name: small", "nam: small", "nam: there is no such key; one of: name, directory, stages"),
        ("name: small", f"name: {'x' * 201}", "name: 'x.*' is not allowed; .* at most 200 characters"),
    ],
)
def test_an_invalid_plan_is_named_in_one_line(plan, old, new, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        plan((old, new))
    assert str(caught.value).startswith("/")
    assert "/plan.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_plan_or_stage_is_named(plan, tmp_path):
    with pytest.raises(ConfigurationError, match=r"other\.yaml does not exist"):
        read_plan(tmp_path / "other.yaml")
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ConfigurationError, match=r"list\.yaml: a mapping"):
        read_plan(tmp_path / "list.yaml")
    with pytest.raises(ConfigurationError, match=r"gone\.yaml: .*No such file"):
        expand(plan(("config: dpo.yaml", "config: gone.yaml")))


def test_cells_are_in_the_order_in_which_they_run(plan):
    cells = expand(plan()).cells
    assert [cell.stage for cell in cells[:3]] == ["sft", "dpo", "rloo"]
    ordered = [(c.point.replicate, c.point.beta_index, c.point.arm) for c in cells[2:]]
    assert ordered == [*itertools.product((0, 1), (0, 1), ("MonteCarlo", "RaoBlackwell"))]
    assert len({cell.id for cell in cells}) == 10
    seen = set()
    for cell in cells:
        assert set(cell.needs) <= seen
        seen.add(cell.id)


def test_a_cell_has_its_command(plan):
    sft, dpo, run, *_ = expand(plan()).cells
    checkpoint = "checkpoints/last.ckpt"
    assert run.argv == (
        "fit",
        *("--config", f"{{runs}}/cells/{run.id}/stage.yaml"),
        *("--seed_everything", str(run.seed)),
        *("--kl.estimator", "MonteCarlo"),
        *("--kl.beta", "0.1"),
        *("--trainer.default_root_dir", f"{{runs}}/cells/{run.id}"),
        *("--model.reference_path", f"{{runs}}/cells/{sft.id}/{checkpoint}"),
        *("--model.policy_path", f"{{runs}}/cells/{dpo.id}/{checkpoint}"),
    )
    assert run.needs == (sft.id, dpo.id)
    assert run.record() == {
        "stage": "rloo",
        "arm": "MonteCarlo",
        "beta": 0.1,
        "beta_index": 0,
        "replicate": 0,
        "seed": run.seed,
        "needs": [sft.id, dpo.id],
        "argv": list(run.argv),
        "overrides": {"kl.estimator": "MonteCarlo"},
    }
    assert sft.record()["arm"] is None
    study, *_ = expand(plan(("stages:", "stages:\n  toys: {config: sft.yaml, command: study}"))).cells
    assert study.argv[0] == "study"
    assert str(run) == "rloo MonteCarlo beta=0.1 #0"


def test_only_pairs_share_a_seed(plan):
    cells = expand(plan()).cells
    seeds = {}
    for cell in cells:
        seeds.setdefault(cell.seed, []).append(cell)
    assert len(seeds) == 6
    for group in seeds.values():
        points = [cell.point for cell in group if cell.point]
        assert len(points) in (0, 2)
        assert len({point[1:] for point in points}) <= 1
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize(
    "change",
    [
        ("{0: 0.1, 1: 0.3}", "{5: 0.05, 0: 0.1, 1: 0.3}"),
        ("replicates: 2", "replicates: 4"),
        ("[MonteCarlo, RaoBlackwell]", "[NoKL, RaoBlackwell, MonteCarlo]"),
        ("  dpo:", "  extra: {config: sft.yaml}\n  dpo:"),
        ("name: small", "name: large"),
        ("runs/small", "/elsewhere"),
        ("control: MonteCarlo", "control: RaoBlackwell, alpha: 0.01"),
    ],
)
def test_growing_or_moving_a_plan_keeps_its_cells(plan, change):
    before, after = by_point(plan()), by_point(plan(change))
    assert before.keys() <= after.keys()
    assert all(after[point].id == cell.id for point, cell in before.items())


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        (("name: small", "name: small\nroot_seed: 1"), {"sft", "dpo", "rloo"}),
        (("name: small", "name: small\nthreads: 2"), {"sft", "dpo", "rloo"}),
        (("config: dpo.yaml", "config: dpo.yaml, threads: 2"), {"dpo", "rloo"}),
        (("dpo.yaml", "other.yaml"), {"dpo", "rloo"}),
        (("rloo.yaml", "other.yaml"), {"rloo"}),
        (("policy_path: dpo", "policy_path: sft"), {"rloo"}),
    ],
)
def test_a_semantic_change_makes_new_cells_of_what_depends_on_it(plan, tmp_path, change, stages):
    (tmp_path / "other.yaml").write_text("trainer: {max_steps: 4}")
    before, after = by_point(plan()), by_point(plan(change))
    assert {cell.stage for point, cell in before.items() if after[point].id != cell.id} == stages


def test_the_written_form_of_a_stage_is_that_of_older_plans_but_for_what_is_new(plan):
    changed = plan(("config: dpo.yaml", "config: dpo.yaml, threads: 2"))
    stages = changed.record()["stages"]
    assert stages["sft"] == {"config": "sft.yaml", "inputs": {}, "overrides": {}}
    assert stages["dpo"]["threads"] == 2
    assert Plan.of_record(changed.record(), changed.directory) == changed


def test_seeds_are_addressed():
    addresses = [*itertools.product(("sft", "dpo", "rloo"), range(5), range(20))]
    assert len({cell_seed(0, *address) for address in addresses}) == len(addresses)
    assert cell_seed(0, "rloo", 1, 2) != cell_seed(1, "rloo", 1, 2) != cell_seed(1, "rloo", 2, 1)
    # Published results have these ids, which must never change.
    assert (cell_seed(0, "sft"), cell_seed(0, "rloo", 1, 2)) == (3640312004, 2570763381)


def test_an_override_of_a_stage_changes_its_cells_and_those_that_start_from_it(plan):
    one = by_point(plan())
    changed = by_point(plan(("config: dpo.yaml,", "config: dpo.yaml, overrides: {trainer.max_steps: 9},")))
    assert changed["dpo"].config["trainer"]["max_steps"] == 9
    assert one["sft"].id == changed["sft"].id
    assert all(one[key].id != changed[key].id for key in one if key != "sft")


def test_the_grid_starts_only_from_the_stages_it_needs(plan):
    assert plan().starting_points == ["sft", "dpo"]
    beside = plan(("  rloo: {", "  study: {config: dpo.yaml, inputs: {a: dpo}}\n  rloo: {"))
    assert beside.starting_points == ["sft", "dpo"]
    through = plan(
        ("  dpo: {config: dpo.yaml,", "  dpo: {config: dpo.yaml,"),
        ("reference_path: sft, model.", "x: dpo, model."),
    )
    assert through.starting_points == ["sft", "dpo"]


SHORT = """
stages: {rloo: {config: rloo.yaml}}
grid: {arms: [MonteCarlo, RaoBlackwell], beta: [0.4, 0.1]}
primary: {control: MonteCarlo}
"""


def test_a_plan_with_one_stage_a_grid_and_a_control_is_complete(plan, tmp_path):
    plan()
    (tmp_path / "short.yaml").write_text(SHORT)
    short = read_plan(tmp_path / "short.yaml")
    assert (short.name, short.directory, short.grid.replicates) == ("short", "runs/short", 10)
    assert short.grid.beta == {0: 0.4, 1: 0.1}
    assert short.grid.arms == {name: {"kl.estimator": name} for name in ("MonteCarlo", "RaoBlackwell")}
    long = SHORT.replace("[0.4, 0.1]", "{0: 0.4, 1: 0.1}") + "name: short\ndirectory: runs/short\n"
    (tmp_path / "long.yaml").write_text(long)
    assert expand(read_plan(tmp_path / "long.yaml")).cells == expand(short).cells


def test_both_spellings_of_a_configuration_key_give_the_same_cells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {"class_path": "RLOOModule", "init_args": {"learning_rate": 0.1, "opt": {"class_path": "Adam"}}}
    (tmp_path / "rloo.yaml").write_text(yaml.safe_dump({"model": model}))

    def cells(arguments):
        keys = "learning_rate", f"opt.{arguments}decay", "k"
        rate, decay, steps = (f"model.{arguments}{key}" for key in keys)
        design = {
            "stages": {
                "sft": {"config": "rloo.yaml"},
                "rloo": {
                    "config": "rloo.yaml",
                    "overrides": {steps: 2},
                    "inputs": {f"model.{arguments}policy_path": "sft"},
                },
            },
            "grid": {"arms": {"a": {rate: 0.5}, "b": {decay: 0.1}}, "beta": [0.1], "replicates": 2},
            "primary": {"control": "a"},
            "name": "x",
            "module": "lit_klrb.schema",
        }
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(design, sort_keys=False))
        return expand(read_plan(tmp_path / "x.yaml")).cells

    assert cells("") == cells("init_args.")
    cell = cells("")[-1]
    assert cell.overrides == {"model.opt.decay": 0.1}
    assert cell.config["model"]["init_args"]["k"] == 2
    design = yaml.safe_load((tmp_path / "x.yaml").read_text())
    design["grid"]["arms"]["a"] = {"model.init_args.lr": 2, "model.lr": 1}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(design, sort_keys=False))
    with pytest.raises(ConfigurationError, match=r"grid.arms.a: .*; a key is given twice, with"):
        read_plan(tmp_path / "x.yaml")
