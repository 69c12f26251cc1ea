"""One line for exceptions of libraries that the user can fix, and no banners or repeated warnings."""

import logging
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

import lit_klrb
from lit_klrb.callbacks import DivergedError
from lit_klrb.cli.setting_types import parameters, subclasses
from lit_klrb.distributed import LOST, is_lost
from lit_klrb.errors import CELL, EXHAUSTED, OUTAGE, ConfigurationError, NoAnswerError, is_exhausted
from lit_klrb.estimators import KLEstimator
from lit_klrb.models.loading import silence
from lit_klrb.reward_functions import KEY
from lit_klrb.stops import Stopped

USAGE, FAILURE = 2, 1
# Keys whose value is a class, and the base classes that they accept.
CLASSES: dict[str, type] = {
    "model": L.LightningModule,
    "data": L.LightningDataModule,
    "kl.estimator": KLEstimator,
}
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib"))
PACKAGE = str(Path(lit_klrb.__file__).parent)


class EndedError(Exception):
    """A command cannot continue for a reason that is not a bug.

    Args:
        line: The message.
        code: The exit code: 2 for a wrong configuration, 69 for a server or a judge that does not answer, 1
            otherwise; in a sweep's cell 69 for all that is missing outside.
    """

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = FAILURE if code == OUTAGE and CELL not in os.environ else code


def ending_of(error: Exception, settings: Mapping[str, Any]) -> EndedError | None:
    """The message for an exception that is not a bug of this package; None for bugs."""
    if isinstance(error, EndedError):
        return error
    path, causes = settings.get("ckpt_path"), list[BaseException]([error])
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, ConfigurationError):
            about_file = cause.key == "ckpt_path" and path is not None and str(path) not in cause.message
            line = f"ckpt_path: {path}: {cause.message}" if about_file else located(cause)
            ending = EndedError(line, USAGE)
            if isinstance(cause, NoAnswerError):
                ending.code = OUTAGE  # also outside a sweep
            return ending
    frames = _frames(error)
    building = any(frame.name in ("instantiate_classes", "_set_seed") for frame in frames)
    for cause in reversed(causes):  # the innermost exception says most
        if (ended := _of_cause(cause, settings, building)) is not None:
            return ended
    return None


def interrupted(
    error: BaseException, settings: Mapping[str, Any], hint: str, begun: bool
) -> EndedError | NoAnswerError | None:
    """What ends a training run instead of an exception: a line with the command that resumes it, `hint`.

    None if the exception itself says enough; `begun` says whether anything was trained.
    """
    if isinstance(error, OSError) and is_exhausted(error):
        root = settings.get("trainer.default_root_dir")
        line = f"{error.strerror}, in the run of {root}; earlier files are whole"
        return EndedError(f"{line}; {hint}", OUTAGE)
    if is_lost(error):
        return EndedError(f"{LOST}; {hint}", OUTAGE)
    if isinstance(error, NoAnswerError):
        return NoAnswerError(f"{error.message}; {hint}", key=error.key)
    if isinstance(error, (Stopped, SystemExit)):
        error.add_note(hint)
    ended = ending_of(error, settings) if isinstance(error, Exception) else None
    if ended is not None and begun and str(ended).startswith(f"model.init_args.{KEY}: "):
        return EndedError(f"{ended}; {hint}", FAILURE)  # a reward need not fail again
    return None


def _of_cause(error: BaseException, settings: Mapping[str, Any], building: bool) -> EndedError | None:
    """The message for one exception of a chain; `building` says whether the run was being built."""
    if (line := _in_users_code(error, settings)) is not None:
        return EndedError(line, USAGE)
    if isinstance(error, OSError) and (ended := _of_file(error, settings)) is not None:
        return ended
    if isinstance(error, OmegaConfBaseException):
        key = f"{error.full_key}: " if error.full_key else ""
        return EndedError(f"{key}{str(error).strip().splitlines()[0]}", USAGE)
    # Lightning or jsonargparse refuses an argument, or does it in a class that the configuration names
    file = frames[-1].filename if (frames := _frames(error)) else ""
    refused = isinstance(error, (ValueError, TypeError, ImportError, RuntimeError)) and bool(
        {"lightning", "jsonargparse"} & {*Path(file).parts}
    )
    named = building or any(_made_in(file, key, value) for key, value in settings.items())
    if (refused and named) or isinstance(error, MisconfigurationException):
        return EndedError(_of_option(error, settings), USAGE)
    if is_lost(error):
        return EndedError(LOST, OUTAGE)
    if isinstance(error, DivergedError):
        return EndedError(str(error), FAILURE)
    no_memory = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if no_memory or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return EndedError("out of memory: smaller batches or models need less", OUTAGE)
    return None


def located(error: ConfigurationError) -> str:
    """The message of an error, with the section of the configuration added to its key.

    Example:
        >>> located(ConfigurationError("must be positive, got 0", key="beta_of_nothing"))
        'beta_of_nothing: must be positive, got 0'
        >>> located(ConfigurationError("must be at least 1, got 0", key="max_steps"))
        'trainer.max_steps: must be at least 1, got 0'
    """
    # One of a mapping is named after it, such as teachers.code
    name = str(error.key).partition(".")[0]
    for section, base in CLASSES.items():
        packaged = [kind for kind in subclasses(base) if kind.__module__.startswith("lit_klrb.")]
        if any(name in parameters(kind).hints for kind in packaged):
            return f"{section}.init_args.{error}"
    return f"trainer.{error}" if error.key in parameters(L.Trainer).hints else str(error)


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _in_users_code(error: BaseException, settings: Mapping[str, Any]) -> str | None:
    """The message for an exception in user code that the configuration names; None for other code."""
    file = error.filename if isinstance(error, SyntaxError) else None
    if isinstance(error, SyntaxError) and file and not _is_in(file, (*LIBRARIES, PACKAGE)):
        return f"{file}, line {error.lineno}: {error.msg}"
    frames = [f for f in _frames(error) if not _is_in(f.filename, LIBRARIES)]
    if not frames or _is_in(frames[-1].filename, (PACKAGE,)):
        return None
    files = [Path(f.filename).stem for f in frames if not _is_in(f.filename, (PACKAGE,))]
    modules = {k: v.replace(":", ".").split(".")[:-1] for k, v in settings.items() if isinstance(v, str)}
    named = [key for name in files for key in modules if name in modules[key]]
    if not named:
        return None
    text, *notes = (" ".join(str(part).split()) for part in (error, *getattr(error, "__notes__", ())))
    where = f"{frames[-1].filename}, line {frames[-1].lineno}"
    return "; ".join([f"{_without_index(named[0])}: {type(error).__name__}: {text} ({where})", *notes])


def _without_index(key: str) -> str:
    above, _, last = key.removesuffix(".class_path").rpartition(".")
    return above if last.isdigit() else f"{above}.{last}".lstrip(".")


def _is_in(filename: str, folders: tuple[str, ...]) -> bool:
    return filename.startswith("<") or any(Path(filename).is_relative_to(folder) for folder in folders)


def _of_file(error: OSError, settings: Mapping[str, Any]) -> EndedError | None:
    """The message for a file that cannot be used; None if neither configuration nor machine is the cause."""
    code = OUTAGE if error.errno in EXHAUSTED else USAGE
    reason = error.strerror or str(error)
    if error.filename is None:
        return EndedError(reason, code) if code == OUTAGE else None
    filename = Path(str(error.filename))
    texts = {key: value for key, value in settings.items() if isinstance(value, str) and value}
    if keys := [key for key, value in texts.items() if _related(Path(value), filename)]:
        key = max(keys, key=lambda key: len(settings[key]))
        where = "" if settings[key] == str(filename) else f"{filename}: "
        return EndedError(f"{key}: {settings[key]} cannot be used ({where}{reason})", code)
    return EndedError(f"{filename}: {reason}", code) if code == OUTAGE else None


def _related(path: Path, other: Path) -> bool:
    """Whether two paths are equal or one is inside the other."""
    path, other = path.expanduser().absolute(), other.absolute()
    return len(path.parts) > 1 and (other.is_relative_to(path) or path.is_relative_to(other))


def _of_option(error: BaseException, settings: Mapping[str, Any]) -> str:
    """The message, with the option whose class refuses its arguments."""
    text = " ".join(str(error).split())
    made = [
        key for frame in _frames(error) for key, v in settings.items() if _made_in(frame.filename, key, v)
    ]
    if not made:
        return text
    first = (text or type(error).__name__).split(". ")[0].rstrip(".!")
    return f"{_without_index(made[0])}: {settings[made[0]]!r} is refused: {first}"


def _made_in(filename: str, key: str, class_path: Any) -> bool:
    """Whether a file defines the class that a key names."""
    if not key.endswith("class_path") or not isinstance(class_path, str):
        return False
    module, _, name = class_path.rpartition(".")
    made = getattr(sys.modules.get(module), name, None)
    return getattr(sys.modules.get(getattr(made, "__module__", "")), "__file__", None) == filename


def quiet() -> None:
    """Suppress hardware banners, and warnings about choices that are made on purpose."""
    # Lightning uses deprecated names of jsonargparse
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    silence()
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for hint in (
        ".*does not have many workers.*",  # the model is the bottleneck; loaders run in the main process
        ".*module\\(s\\) in eval mode.*",  # the reference, and the policy where dropout is off
        ".*dirpath has changed.*",  # a run directory may be moved, or its checkpoint evaluated elsewhere
        ".*exists and is not empty.*",  # a resumed run writes to the same directory
        ".*callbacks used to create the checkpoint.*",  # check_same_run checks which may differ
        ".*`srun` command is available.*",  # a machine with SLURM, on which a run need not be a job
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",  # Lightning's own use of torch
    ):
        warnings.filterwarnings("ignore", hint)


@contextmanager
def warn_once_per_line() -> Iterator[None]:
    """Show only the first warning from each line of code while the block runs.

    Python repeats warnings whose text differs, even if only in a number: thousands in a long run.
    """
    show = warnings.showwarning
    shown: set[tuple[type[Warning], str, int]] = set()

    def show_once(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **named: Any
    ) -> None:
        kind = category, filename, lineno
        if kind not in shown:
            shown.add(kind)
            show(message, category, filename, lineno, *rest, **named)

    warnings.showwarning = show_once
    try:
        yield
    finally:
        warnings.showwarning = show
