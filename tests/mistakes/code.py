"""Mistakes in user code: return values of rewards, incomplete estimators, failing imports."""

from collections.abc import Iterator
from pathlib import Path

from mistakes.driver import Mistake

MODULES = {
    "wrong_import.py": "import no_such_package\n",
    "wrong_syntax.py": "def broken(:\n",
    "wrong_start.py": "1 / 0\n",
}

REWARDS = {
    "not_callable": "not_callable is 5",
    "text": "'good'",
    "nothing": "None",
    "texts_back": "must return .* numbers",
    "numbers_as_texts": r"'1\.0'",
    "generator": None,
    "one_number": "1\\.0",
    "too_few": r"must return \d+ numbers .*got \d+",
    "too_many": r"must return \d+ numbers .*got \d+",
    "empty": r"must return \d+ numbers .*got 0",
    "columns": r"must return \d+ numbers",
    "ragged": r"must return \d+ numbers",
    "not_a_number": "gave nan for the text",
    "infinite": "gave inf for the text",
    "overflowing": "gave .* for the text",
    "complex_numbers": "1j",
    "mapping": r"must return \d+ numbers",
    "nones": "every reward gives None for",
    "booleans": None,
    "integers": None,
    "tensor": None,
    "tensor_with_gradient": None,
    "double": None,
    "raises": r"RuntimeError: no luck today \(.*wrong_code\.py, line \d+\)",
    "raises_key": r"KeyError: 'nothing' \(.*wrong_code\.py, line \d+\)",
    "raises_deep": r"RuntimeError: .*size.* \(.*wrong_code\.py, line \d+\)",
    "no_arguments": r"no_arguments cannot be called with a list of texts .*takes 0",
    "two_arguments": r"two_arguments cannot be called with a list of texts .*missing .*'more'",
    "recursive": r"RecursionError",
    "later": "gave nan for the text",
    "Reward": "Reward is a class",
    "NeedsArguments": "NeedsArguments is a class",
    "no_such_function": "cannot import wrong_code:no_such_function",
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
}
ESTIMATORS = {
    "NotAnEstimator": r"kl\.estimator: .*NotAnEstimator",
    "Abstract": r"kl\.estimator: .*Abstract.*abstract",
    "RaisesInInit": r"kl\.estimator: .*RuntimeError: no luck at the start \(.*wrong_code\.py, line \d+\)",
    "RaisesInWeights": r"RuntimeError: no luck with weights \(.*wrong_code\.py, line \d+\)",
    "NoWeights": r"kl\.estimator: NoWeights\.weights .*None",
    "FewWeights": r"kl\.estimator: FewWeights\.weights.* shape",
    "ListWeights": r"kl\.estimator: ListWeights\.weights .*list",
    "NanWeights": "^error: diverged at step 0",
    "OtherArguments": r"kl\.estimator: OtherArguments\.weights must take",
    "NoLoss": r"kl\.estimator: NoLoss\.loss .*None",
    "LongLoss": r"kl\.estimator: LongLoss\.loss .*shape",
    "DetachedLoss": r"kl\.estimator: DetachedLoss\.loss .*gradient",
    "RaisesInLoss": r"RuntimeError: no luck with the loss \(.*wrong_code\.py, line \d+\)",
    "Unexplained": None,
    "no_such_class": r"kl\.estimator: .*'wrong_code' has no attribute 'no_such_class'",
}


def make_code(root: Path) -> None:
    """Write modules that cannot be imported; `wrong_code` can be."""
    for name, content in MODULES.items():
        (root / name).write_text(content)


def wrong_code() -> Iterator[Mistake]:
    """Rewards, estimators, callbacks, modules and data modules of a user."""
    for name, line in REWARDS.items():
        located = None if line is None else rf"model\.init_args\.reward_path: .*{line}"
        yield Mistake(["--model.reward_path", f"wrong_code:{name}"], located)
    for name in ("text", "nothing", "generator", "too_few", "raises"):
        line = REWARDS[name]
        located = None if line is None else rf"model\.init_args\.reward_path: .*{line}"
        yield Mistake(["--model.reward_path", f"wrong_code:{name}"], located, "dpo")
        yield Mistake(["--model.reward_path", f"wrong_code:{name}"], located, command="predict")
    yield Mistake(["--model.reward_path", "{grammar: 1, wrong_code:text: 2}"], r"reward_path: .*'good'")
    for path, line in IMPORTS.items():
        yield Mistake(["--model.reward_path", path], rf"model\.init_args\.reward_path: .*{line}")
    for name, line in ESTIMATORS.items():
        code = 1 if name == "NanWeights" else None  # as any run that diverges: its state is recorded
        yield Mistake(["--kl.estimator", f"wrong_code.{name}"], line, code=code)
    yield Mistake(
        ["--kl.estimator", "no_such_module.Estimator"], r"kl\.estimator: .*No module named 'no_such_module'"
    )
    yield Mistake(
        ["--kl.estimator", "wrong_import.Estimator"], r"kl\.estimator: .*No module named 'no_such_package'"
    )
    callback = "--trainer.callbacks+=wrong_code.RaisingCallback"
    yield Mistake([callback], r"RuntimeError: no luck in a callback \(.*wrong_code\.py, line \d+\)")
    for name in ("NotAnEstimator", "no_such_class"):
        yield Mistake(
            [f"--trainer.callbacks+=wrong_code.{name}"], rf"trainer\.callbacks: .*wrong_code\.{name}"
        )
    rest = ["--trainer.max_steps", "2", "--trainer.default_root_dir", "RUN", "--trainer.accelerator", "cpu"]
    grammar = [
        "--model",
        "SFTModule",
        "--model.policy_config",
        "{model_type: gpt2, n_embd: 8, n_head: 2, n_layer: 1}",
    ]
    for model, data, line in (
        (
            "RaisingModule",
            "PromptDataModule",
            r"RuntimeError: no luck in a module \(.*wrong_code\.py, line \d+\)",
        ),
        ("OtherModule", "PromptDataModule", r"^error: data: .*PromptDataModule.*OtherModule"),
        ("OtherModule", "ReviewDataModule", r"^error: data: .*ReviewDataModule.*OtherModule"),
    ):
        yield Mistake(["fit", "--model", f"wrong_code.{model}", "--data", data, *rest], line, stage=None)
    for data, line in (
        ("OtherData", r"^error: data: .*OtherData.*SFTModule"),
        ("EmptyData", r"^error: `train_dataloader` must be implemented"),
    ):
        argv = ["fit", *grammar, "--data", f"wrong_code.{data}", *rest]
        yield Mistake(argv, line, stage=None, name=f"fit grammar: {data}")
