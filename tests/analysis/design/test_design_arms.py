"""Arms with any overrides: checks when the plan is made, and their record."""

import json
import subprocess

import pytest
import yaml

from analysis.cli import main
from analysis.design import expand, read_plan
from analysis.results import DamagedFileError
from analysis.results.locked import LockedPlan
from analysis.results.records import Arm
from lit_klrb.errors import ConfigurationError

ARMS = {
    "right": {"kl.estimator": "MonteCarlo"},
    "wrong": {"kl.estimator": "K3Loss", "kl.estimator.allow_biased": True},
    "long": {"kl.estimator": "MonteCarlo", "prompts": 16},
}


@pytest.fixture
def write(desk):
    """Write a plan of two stages."""

    def write(arms=ARMS, control="right", module="fake_job", rloo=None, **primary):
        (desk / "dpo.yaml").write_text("{seconds: 0}")
        (desk / "rloo.yaml").write_text(yaml.safe_dump(rloo or {"seconds": 0}))
        inputs = {"model.init_args.policy_path": "dpo"}
        plan = {
            "name": "arms",
            "directory": "runs",
            "module": module,
            "stages": {"dpo": {"config": "dpo.yaml"}, "rloo": {"config": "rloo.yaml", "inputs": inputs}},
            "grid": {"arms": arms, "beta": {0: 0.1}, "replicates": 2},
            "primary": {"control": control, **primary},
        }
        (desk / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
        return desk / "plan.yaml"

    return write


def cells(path):
    return {
        (cell.point.arm, cell.point.replicate): cell for cell in expand(read_plan(path)).cells if cell.point
    }


def test_a_plan_for_programs_has_what_the_text_has(write, capsys):
    path = write()
    assert main(["plan", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    assert main(["plan", "--config", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert f"arms: {len(answer['cells'])} cells, {answer['to_run']} to run, in {answer['directory']}" in text
    assert {cell["id"] for cell in answer["cells"]} >= {cell.id for cell in cells(path).values()}
    assert answer["arms"].keys() == ARMS.keys()
    assert ("CANNOT reach p" in text) == (not answer["power"]["can_reject"])
    assert answer["seconds"] is None, "no cell has run"


def test_the_schema_of_plans_has_every_key_and_both_spellings(write, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["plan", "--schema"])
    schema = json.loads(capsys.readouterr().out)
    assert schema["required"] == ["stages", "grid", "primary"]
    assert {*yaml.safe_load(write().read_text())} <= schema["properties"].keys()
    grid = schema["$defs"]["Grid"]["properties"]
    for key in ("arms", "beta"):
        assert [one["type"] for one in grid[key]["anyOf"]] == ["array", "object"], key


def test_an_arms_id_depends_on_its_overrides_and_not_on_its_label(write):
    before = cells(write())
    renamed = {"same" if label == "wrong" else label: ARMS[label] for label in reversed(ARMS)}
    after = cells(write(renamed))
    assert after["same", 1].id == before["wrong", 1].id
    assert {cell.id for cell in after.values()} == {cell.id for cell in before.values()}
    changed = cells(write(ARMS | {"wrong": {**ARMS["wrong"], "kl.estimator.allow_biased": False}}))
    differing = {place for place in before if before[place].id != changed[place].id}
    assert differing == {("wrong", 0), ("wrong", 1)}


def test_arms_share_seeds_and_carry_their_overrides(write):
    found = cells(write())
    assert len({found[label, 0].seed for label in ARMS}) == 1
    assert found["long", 0].seed != found["long", 1].seed
    wrong = found["wrong", 0]
    assert wrong.argv[3:11] == (
        *("--seed_everything", str(wrong.seed)),
        *("--kl.estimator", "K3Loss"),
        *("--kl.estimator.allow_biased", "true"),
        *("--kl.beta", "0.1"),
    )
    assert wrong.record()["arm"] == "wrong"
    assert wrong.record()["overrides"] == ARMS["wrong"]


def at_two_betas(path):
    content = yaml.safe_load(path.read_text())
    content["grid"]["beta"] = {0: 0.1, 2: 0.3}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_a_value_may_differ_between_betas(write):
    long = {"kl.estimator": "MonteCarlo", "prompts": {"by_beta": {0: 16, 2: 8}}}
    path = at_two_betas(write({**ARMS, "long": long}))
    found = [cell for cell in expand(read_plan(path)).cells if cell.point and cell.point.arm == "long"]
    assert {cell.point.beta: cell.overrides["prompts"] for cell in found} == {0.1: 16, 0.3: 8}
    given = {cell.point.beta: cell.argv[cell.argv.index("--prompts") + 1] for cell in found}
    assert given == {0.1: "16", 0.3: "8"}
    assert main(["plan", "--config", str(path)]) == 0
    locked = LockedPlan.read(path.parent / "runs" / "plan.json")
    assert locked.plan.grid == read_plan(path).grid


def test_a_locked_plan_without_a_value_for_every_beta_is_one_line(write, capsys):
    long = {"kl.estimator": "MonteCarlo", "prompts": {"by_beta": {0: 16, 2: 8}}}
    path = at_two_betas(write({**ARMS, "long": long}))
    assert main(["plan", "--config", str(path)]) == 0
    locked = path.parent / "runs" / "plan.json"
    content = json.loads(locked.read_text())
    del content["content"]["plan"]["grid"]["arms"]["long"]["prompts"]["by_beta"]["2"]
    locked.write_text(json.dumps(content))
    with pytest.raises(DamagedFileError, match="not a locked plan"):
        LockedPlan.read(locked)


def test_an_error_at_a_later_beta_is_reported_when_the_plan_is_made(write, capsys):
    odd = {"x_path": {"by_beta": {0: "dpo.yaml", 2: "gone"}}}
    assert main(["plan", "--config", str(at_two_betas(write({"right": ARMS["right"], "odd": odd})))]) == 2
    assert capsys.readouterr().err == "error: grid.arms.odd: x_path: gone does not exist\n"


def test_an_arm_without_evaluations_is_refused(write, capsys):
    blind = {"kl.estimator": "MonteCarlo", "trainer.limit_val_batches": 0}
    assert main(["plan", "--config", str(write({"right": ARMS["right"], "blind": blind}))]) == 2
    error = "grid.arms.blind: trainer.limit_val_batches: must not be 0, as evaluations are the results"
    assert capsys.readouterr().err == f"error: {error}\n"


def test_values_are_passed_as_json_and_files_count_by_content(write, tmp_path):
    (tmp_path / "words.txt").write_text("a")
    arms = {
        "right": {"trainer.callbacks": [{"class_path": "KLMonitor"}], "data.source": "words.txt", "a": None}
    }
    (cell, _) = cells(write(arms)).values()
    options = dict(zip(cell.argv[1::2], cell.argv[2::2], strict=True))
    assert json.loads(options["--trainer.callbacks"]) == [{"class_path": "KLMonitor"}]
    assert options["--a"] == "null"
    assert options["--data.source"] == "words.txt"
    (tmp_path / "words.txt").write_text("b")
    assert cells(write(arms))["right", 0].id != cell.id


@pytest.mark.parametrize("names", [["MonteCarlo", "K3Loss"], ["NoKL"]])
def test_a_list_of_estimators_is_a_shorthand(write, names):
    grid = read_plan(write(names, control=names[0])).grid
    assert grid.arms == {name: {"kl.estimator": name} for name in names}
    spelled_out = write({name: {"kl.estimator": name} for name in names}, control=names[0])
    assert read_plan(spelled_out).grid == grid


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ({"right": {"kl.beta": 1}}, r"grid.arms.right.kl.beta: 1 is not allowed; grid.beta sets it"),
        ({"right": {"model.policy_path": "x"}}, r"right.model.policy_path: 'x' is not allowed"),
        ({"right": {"a": float("nan")}}, r"grid.arms.right.a: nan is not allowed; plain values"),
        ({"right": {}, "other": {}}, r"grid.arms.other: {} is not allowed; right is the same"),
        ({" right": {}}, r"grid.arms: ' right' is not allowed; labels"),
        ({"left": {}}, r"primary.control: 'right' is not allowed; one of: left"),
        (["right", {"kl.estimator": "MonteCarlo"}], r"grid.arms: .* is not allowed; a list of different"),
        ({"right": "MonteCarlo"}, r"grid.arms.right: "),
        ({"right": {"lr": {"by_beta": {1: 2}}}}, r"right.lr: .* is not allowed; a value for each of 0"),
        ({"right": {"kl.estimator.k": {"by_beta": {0: 2}}}}, r"right.kl.estimator.k: .* an arm has the"),
    ],
)
def test_invalid_arms_are_refused(write, arms, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_plan(write(arms))
    assert "\n" not in str(caught.value)


def test_the_plan_records_what_each_arm_optimises(write, capsys, tmp_path):
    assert main(["plan", "--config", str(write())]) == 0
    out = capsys.readouterr().out
    assert "right\tMonteCarlo\ta hash\n" in out
    assert "wrong\tK3Loss, biased\ta hash\n" in out
    assert "evaluated with prompts = 16, the control with 8: not the same outcome\n" in out
    assert LockedPlan.read(tmp_path / "runs" / "plan.json").arms == {
        "right": Arm("FakeModule", "MonteCarlo", "a hash"),
        "wrong": Arm("FakeModule", "K3Loss", "a hash", biased=True),
        "long": Arm("FakeModule", "MonteCarlo", "a hash", evaluation={"prompts": [16, 8]}),
    }


def test_arms_are_checked_once(write, capsys, monkeypatch):
    run = subprocess.run

    def broken(words, *args, **kwargs):
        if words[0] == "git":
            return run(words, *args, **kwargs)
        raise AssertionError("asked again")

    assert main(["plan", "--config", str(write())]) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr("subprocess.run", broken)
    assert main(["plan", "--config", str(write())]) == 0
    assert capsys.readouterr().out == first
    with pytest.raises(AssertionError, match="asked again"):
        main(["plan", "--config", str(write(ARMS | {"new": {"kl.estimator": "NoKL"}}))])


@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_errors_of_a_cell_are_reported_when_the_plan_is_made(write, capsys, tmp_path, command):
    path = write(rloo={"behaviour": {"K3Loss": "refused"}})
    assert main([command, "--config", str(path)]) == 2
    assert capsys.readouterr() == ("", "error: grid.arms.wrong: K3Loss is refused for training\n")
    assert not (tmp_path / "runs").exists()


def test_a_module_that_cannot_check_is_named(write, capsys):
    assert main(["plan", "--config", str(write(module="lit_klrb.schema"))]) == 2
    assert "module: python -m lit_klrb.schema check gave no answer: exit code 0" in capsys.readouterr().err
