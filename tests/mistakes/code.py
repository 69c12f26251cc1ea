"""Mistakes in user code: return values of rewards, incomplete estimators, failing imports."""

from collections.abc import Iterator
from pathlib import Path

from mistakes.driver import Mistake
from mistakes.wrong_code import REWARDS

MODULES = {
    "wrong_import.py": "import no_such_package\n",
    "wrong_syntax.py": "def broken(:\n",
    "wrong_start.py": "1 / 0\n",
}
IMPORTS = {
    "no_such_module:f": "cannot import no_such_module:f",
    "wrong_import:f": "cannot import wrong_import:f.*no_such_package",
    "wrong_syntax:broken": r"cannot import wrong_syntax:broken.*line 1",
    "wrong_start:f": r"cannot import wrong_start:f.*ZeroDivisionError",
    ":f": ":f",
    "wrong_code:": "wrong_code:",
    "wrong_code:a:b": "wrong_code:a:b",
    "..code:f": r"\.\.code:f",
    "math:pi": "math:pi is 3.14|pi is 3.14",
    "math:sqrt": "math:sqrt cannot be called with a list of texts",
    "wrong_code:not_callable": "not_callable is 5",
    "wrong_code:Reward": "Reward is a class",
    "wrong_code:no_such_function": "cannot import wrong_code:no_such_function",
}
WHERE = r"\(.*wrong_code\.py, line \d+\)"
ESTIMATORS = {
    "wrong_code.NotAnEstimator": r"kl\.estimator: .*NotAnEstimator",
    "wrong_code.Abstract": r"kl\.estimator: .*Abstract.*abstract",
    "wrong_code.RaisesInInit": rf"kl\.estimator: .*RuntimeError: no luck at the start {WHERE}",
    "wrong_code.RaisesInWeights": rf"RuntimeError: no luck with weights {WHERE}",
    "wrong_code.NoWeights": r"kl\.estimator: NoWeights\.weights .*None",
    "wrong_code.FewWeights": r"kl\.estimator: FewWeights\.weights.* shape",
    "wrong_code.ListWeights": r"kl\.estimator: ListWeights\.weights .*list",
    "wrong_code.NanWeights": "^error: diverged at step 0",
    "wrong_code.OtherArguments": r"kl\.estimator: OtherArguments\.weights must take",
    "wrong_code.NoLoss": r"kl\.estimator: NoLoss\.loss .*None",
    "wrong_code.LongLoss": r"kl\.estimator: LongLoss\.loss .*shape",
    "wrong_code.DetachedLoss": r"kl\.estimator: DetachedLoss\.loss .*gradient",
    "wrong_code.RaisesInLoss": rf"RuntimeError: no luck with the loss {WHERE}",
    "wrong_code.Unexplained": None,
    "wrong_code.no_such_class": r"kl\.estimator: .*'wrong_code' has no attribute 'no_such_class'",
    "no_such_module.Estimator": r"kl\.estimator: .*No module named 'no_such_module'",
    "wrong_import.Estimator": r"kl\.estimator: .*No module named 'no_such_package'",
}


def make_code(root: Path) -> None:
    """Write modules that cannot be imported; `wrong_code` can be."""
    for name, content in MODULES.items():
        (root / name).write_text(content)


def wrong_code() -> Iterator[Mistake]:
    """Rewards, estimators, callbacks, modules and data modules of a user."""
    rewards = {f"wrong_code:{name}": line for name, (_, line) in REWARDS.items()} | IMPORTS
    for path, line in rewards.items():
        located = None if line is None else rf"model\.init_args\.reward_path: .*{line}"
        yield Mistake(["--model.reward_path", path], located)
        if path.endswith((":text", ":generator", ":too_few", ":raises")):
            yield Mistake(["--model.reward_path", path], located, "dpo")
            yield Mistake(["--model.reward_path", path], located, command="predict")
    yield Mistake(["--model.reward_path", "{grammar: 1, wrong_code:text: 2}"], r"reward_path: .*'good'")
    for path, line in ESTIMATORS.items():
        code = 1 if path.endswith("NanWeights") else None  # as any run that diverges: its state is recorded
        yield Mistake(["--kl.estimator", path], line, code=code)
    for name, line in (
        ("RaisingCallback", rf"RuntimeError: no luck in a callback {WHERE}"),
        ("NotAnEstimator", r"trainer\.callbacks: .*wrong_code\.NotAnEstimator"),
        ("no_such_class", r"trainer\.callbacks: .*wrong_code\.no_such_class"),
    ):
        yield Mistake([f"--trainer.callbacks+=wrong_code.{name}"], line)
    grammar = ["SFTModule", "--model.policy_config", "{model_type: gpt2, n_embd: 8, n_head: 2, n_layer: 1}"]
    for model, data, line in (
        (["wrong_code.RaisingModule"], "PromptDataModule", rf"RuntimeError: no luck in a module {WHERE}"),
        (["wrong_code.OtherModule"], "PromptDataModule", r"^error: data: .*PromptDataModule.*OtherModule"),
        (["wrong_code.OtherModule"], "ReviewDataModule", r"^error: data: .*ReviewDataModule.*OtherModule"),
        (grammar, "wrong_code.OtherData", r"^error: data: .*OtherData.*SFTModule"),
        (grammar, "wrong_code.EmptyData", r"^error: `train_dataloader` must be implemented"),
    ):
        rest = [
            "--trainer.max_steps",
            "2",
            "--trainer.default_root_dir",
            "RUN",
            "--trainer.accelerator",
            "cpu",
        ]
        argv = ["fit", "--model", *model, "--data", data, *rest]
        yield Mistake(argv, line, stage=None, name=f"fit {model[0]} on {data}")
