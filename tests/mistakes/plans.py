"""Mistakes in the input of analyses: plans, logs of other software, mappings, published points."""

import copy
from collections.abc import Iterator
from pathlib import Path
from re import escape

import yaml

from mistakes.driver import Mistake
from mistakes.places import KINDS
from mistakes.results import analysis_mistake, changed

DEEP = 100_000
SETTINGS = {
    "name": ("[1]", "n" * 200_000),
    "directory": ("null", '"a\\0b"', "''", "'  '"),
    "root_seed": ("-1", "many"),
    "threads": ("0",),
    "module": ("no_such_module", "''"),
    "stages": ("{}", "[sft]", "{sft: 5}", "{sft: {config: no.yaml}}", "{sft: {}}"),
    "grid": ("null", "[]"),
    "grid.arms": (
        *("{}", "[5]", "{a: 5}", "[MonteCarlo, MonteCarlo]", "{a: {kl.beta: 1}}"),
        "{? %s : {kl.estimator: MonteCarlo}, MonteCarlo: {kl.estimator: RaoBlackwell}}" % ("a" * 200_000),
    ),
    "grid.beta": ("{0: 0.1, 1: 0.1}", "{}", "{0: -1}", "{0: .nan}", "{0: .inf}", "{0: much}", "{-1: 1}"),
    "grid.replicates": ("0", "1.5", "100000000000"),
    "grid.blocks": (
        *("[a, b]", "{a: {}}", "{a: {}, b: {overrides: {kl.beta: 1}}}"),
        "{a: {}, b: {inputs: {x: no_stage}}}",
    ),
    "primary": ("null", "{}"),
    "primary.control": ("Nobody", "''"),
    "primary.alpha": ("0", "1", ".nan"),
    "primary.margins": ("{objective: -1}", "{objective: .nan}", "{nothing: 1}", "{kl: 1}"),
    "primary.outcome": ("reward",),
    "unknown": ("5",),
    "grid.unknown": ("5",),
    "primary.unknown": ("5",),
}
LOGS: dict[str, bytes] = {
    "empty.csv": b"",
    "header.csv": b"arm,beta,seed,reward,kl\n",
    "no_kl.csv": b"arm,beta,seed,reward\nmc,0.1,0,1\n",
    "words.csv": b"arm,beta,seed,reward,kl\nmc,0.1,0,good,1\n",
    "beta_words.csv": b"arm,beta,seed,reward,kl\nmc,small,0,1,1\n",
    "beta_negative.csv": b"arm,beta,seed,reward,kl\nmc,-1,0,1,1\n",
    "beta_infinite.csv": b"arm,beta,seed,reward,kl\nmc,inf,0,1,1\n",
    "short.csv": b"arm,beta,seed,reward,kl\nmc,0.1\n",
    "long.csv": b"arm,beta,seed,reward,kl\nmc,0.1,0,1,1,1\n",
    "twice.csv": b"arm,arm,seed,reward,kl\nmc,0.1,0,1,1\n",
    "same_run.csv": b"arm,beta,seed,reward,kl\nmc,0.1,0,1,1\nmc,0.1,0,2,1\n",
    "one_arm.csv": b"arm,beta,seed,reward,kl\nrb,0.1,0,1,1\n",
    "quote.csv": b'arm,beta,seed,reward,kl\n"mc,0.1,0,1,1\n',
    "latin1.csv": "arm,beta,seed,reward,kl\ncaf\u00e9,0.1,0,1,1\n".encode("latin-1"),
    "utf16.csv": "arm,beta,seed,reward,kl\nmc,0.1,0,1,1\n".encode("utf-16"),
    "nul.csv": b"arm,beta,seed,reward,kl\nmc\0,0.1,0,1,1\n",
    "binary.csv": bytes(range(256)) * 10,
    "field.csv": b"arm,beta,seed,reward,kl\n" + b"m" * 200_000 + b",0.1,0,1,1\n",
    "deep.json": b"[" * DEEP,
    "number.json": b"5",
    "rows_of_numbers.json": b"[1, 2]",
    "torn.jsonl": b'{"arm": "mc", "beta"',
    "list.jsonl": b"[1]\n",
    "huge_number.jsonl": b'{"arm": "mc", "beta": 1' + b"0" * 400 + b', "seed": 0, "reward": 1, "kl": 1}\n',
    "digits.jsonl": b'{"arm": "mc", "beta": 1' + b"0" * 5000 + b', "seed": 0, "reward": 1, "kl": 1}\n',
    "nested.jsonl": b'{"arm": ["mc"], "beta": 1, "seed": 0, "reward": 1, "kl": 1}\n',
    "log.txt": b"arm,beta,seed,reward,kl\nmc,0.1,0,1,1\n",
}
MAPPINGS = {
    "name": ("[1]",),
    "columns": ("null", "5", "{}", "{reward: reward}", "{arm: [1], reward: reward, kl: kl}"),
    "columns.nothing": ("x",),
    "columns.kl": ("no_such_column", "5"),
    "primary": ("null", "5", "{}"),
    "primary.control": ("Nobody", "null"),
    "primary.margins": ("{objective: -1}", "5"),
    "files": ("'{arm}.csv'", "'../*.csv'", "''", "'.'", "'**'", "'{arm}{arm}'", "'{arm}{beta}{replicate}'"),
    "runs": ("5", "[1]", "{one: 5}", "{one: {nothing: 1}}"),
    "unknown": ("5",),
}


def make_plans(root: Path) -> None:
    """Write plans, mappings and logs; plans and mappings have one wrong setting each."""
    root = root / "sweeps"
    demo = Path(__file__).parents[2] / "configs" / "demo"
    plan = yaml.safe_load((demo / "sweep.yaml").read_text())
    plan["directory"] = str(root / "planned")
    for stage in plan["stages"].values():
        stage["config"] = str(demo / Path(stage["config"]).name)
    mapping = {
        "name": "theirs",
        "columns": {"arm": "arm", "beta": "beta", "replicate": "seed", "reward": "reward", "kl": "kl"},
        "primary": {"control": "mc"},
    }
    for kind, content, table in (("plan", plan, SETTINGS), ("mapping", mapping, MAPPINGS)):
        (root / f"{kind}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        for key, values in table.items():
            for number, value in enumerate(values):
                wrong = changed(copy.deepcopy(content), key, yaml.safe_load(value))
                (root / f"{kind}_{key}_{number}.yaml").write_text(yaml.safe_dump(wrong, sort_keys=False))
    for name, content in LOGS.items():
        (root / name).write_bytes(content)
    (root / "log.csv").write_bytes(
        b"arm,beta,seed,reward,kl\n"
        + b"".join(b"%s,%s,%d,1.%d,0.%d\n" % (a, b, s, s, s) for a in (b"mc", b"rb") for b in (b"0.1", b"0.3")
                   for s in range(3))
    )  # fmt: skip


def wrong_plans() -> Iterator[Mistake]:
    """`plan` with one wrong setting in the file, and with wrong options."""
    for key, values in SETTINGS.items():
        for number, _ in enumerate(values):
            section, _, name = key.partition(".")
            named = rf"plan_{escape(key)}_{number}\.yaml: .*({section}|{name or section}|value: \['sft'\])"
            line = rf"{named}|^error: (module: '.*' is not installed|no\.yaml: )"
            yield analysis_mistake(["plan", "--config", f"FILES/sweeps/plan_{key}_{number}.yaml"], line)
    for name in [
        "empty",
        "list",
        "scalar",
        "latin1",
        "utf16",
        "tab",
        "deep",
        "deep_list",
        "anchors",
        "binary",
    ]:
        yield analysis_mistake(["plan", "--config", f"FILES/{name}.yaml"], rf"FILES/{name}\.yaml")
    for kind in KINDS:
        for command in ("plan", "sweep"):
            yield analysis_mistake([command, "--config", f"FILES/{kind}.yaml"], rf"FILES/{kind}\.yaml")
    good = ["--config", "FILES/sweeps/plan.yaml"]
    for argv, line in (
        (["plan"], "--config"),
        (["sweep"], "--config"),
        (["plan", *good, "--workers", "0"], "--workers.*'0'"),
        (["plan", *good, "--workers", "many"], "--workers.*'many'"),
        (["sweep", *good, "--launcher", "nothing"], "--launcher.*'nothing'"),
        (["sweep", *good, "--address", "here:1"], "--address here:1"),
        (["plan", *good, "--unknown", "5"], "--unknown"),
        (["plan", "--config", "/dev/zero"], "/dev/zero"),
        (["plan", "--config", "x" * 5000], "xxx"),
    ):
        yield analysis_mistake(argv, line)


def wrong_logs() -> Iterator[Mistake]:
    """`import` of invalid logs and mappings."""
    out = ["--output", "RUN"]
    for name in LOGS:
        argv = ["import", f"FILES/sweeps/{name}", "--config", "FILES/sweeps/mapping.yaml", *out]
        yield analysis_mistake(argv, rf"{escape(name)}|mapping\.yaml")
    for key, values in MAPPINGS.items():
        for number, _ in enumerate(values):
            config = f"FILES/sweeps/mapping_{key}_{number}.yaml"
            argv = ["import", "FILES/sweeps/log.csv", "--config", config, *out]
            yield analysis_mistake(argv, rf"mapping_{escape(key)}_{number}\.yaml|{escape(key)}|log\.csv")
    whole = ["--config", "FILES/sweeps/mapping.yaml"]
    for argv, line in (
        (["import", "FILES/sweeps/log.csv", *whole, *out], None),
        (["import", "/no/where.csv", *whole, *out], r"/no/where\.csv"),
        (["import", "FILES/folder.csv", *whole, *out], r"FILES/folder\.csv"),
        (["import", "FILES/fifo.csv", *whole, *out], r"FILES/fifo\.csv"),
        (["import", "FILES/circle.csv", *whole, *out], r"FILES/circle\.csv"),
        (["import", "FILES/sweeps", *whole, *out], r"FILES/sweeps"),
        (["import", "FILES/sweeps/log.csv", "--config", "FILES/fifo.yaml", *out], r"FILES/fifo\.yaml"),
        (["import", "FILES/sweeps/log.csv", *whole, "--output", "FILES/a_file"], r"FILES/a_file"),
        (["import", "FILES/sweeps/log.csv", *whole, "--output", "FILES/a_file/x"], r"FILES/a_file/x"),
        (["import", "FILES/sweeps/log.csv", *whole, "--output", "FILES/sweeps/whole"], r"FILES/sweeps/whole"),
        (["import", "FILES/sweeps/log.csv", *whole, "--output", "/proc/nowhere"], "/proc/nowhere"),
        (["import"], "FILE"),
    ):
        yield analysis_mistake(argv, line)
