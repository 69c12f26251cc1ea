"""`python -m lit_klrb export`: writes a checkpoint as a folder that `transformers` loads."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lit_klrb.cli.arguments import Arguments
from lit_klrb.errors import ConfigurationError

# The files of an export. A folder with any other file is never replaced.
EXPORTED = re.compile(
    r"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|chat_template\.jinja|additional_chat_templates|SHA256SUMS"
)


def export_checkpoint(ckpt_path: str, output_dir: str) -> None:
    """Write the policy of a checkpoint as a folder, with an adapter merged into the weights.

    The folder is created atomically and replaces an earlier export. SHA256SUMS has the checksums of its
    weights.

    Args:
        ckpt_path: A checkpoint written by `fit`.
        output_dir: The folder to write: a new or an empty one, or an earlier export.

    Raises:
        ConfigurationError: If the checkpoint contains no policy, or the folder cannot be written.
    """
    target = Path(output_dir).expanduser().resolve()
    check_target(target)
    from lit_klrb.models.adapters import has_adapter, merged
    from lit_klrb.models.folders import write_checksums
    from lit_klrb.models.loading import load_checkpoint

    if not Path(ckpt_path).expanduser().exists():
        raise ConfigurationError(f"{ckpt_path} does not exist", key="ckpt_path")

    model, tokenizer = load_checkpoint("ckpt_path", ckpt_path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        (merged(model) if has_adapter(model) else model).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_checksums(partial)
        move_into_place(partial, target)
    except OSError as error:
        raise ConfigurationError(f"cannot write {output_dir}: {error}", key="output_dir") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_target(target: Path) -> None:
    """Check that a path is free, an empty folder, or an earlier export.

    Raises:
        ConfigurationError: If not; names the path and an obstructing file.
    """
    key = "output_dir"
    if target == Path.cwd():
        raise ConfigurationError(f"{target} is the current directory; name a new folder", key=key)
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file; name a new folder", key=key)
    names = sorted(path.name for path in target.iterdir()) if target.exists() else []
    foreign = [name for name in names if not EXPORTED.fullmatch(name)]
    if foreign or (names and "config.json" not in names):
        raise ConfigurationError(
            f"{target} contains {(foreign or names)[0]} and is not an earlier export; name a new folder",
            key=key,
        )


def move_into_place(partial: Path, target: Path) -> None:
    """Rename a complete folder to its final name; an earlier export is removed only after that."""
    if not target.exists() or not any(target.iterdir()):
        partial.rename(target)  # replaces an empty folder
        return
    earlier = partial.with_name(f"{partial.name}.earlier")
    target.rename(earlier)
    partial.rename(target)
    shutil.rmtree(earlier)


def main(argv: Sequence[str]) -> int:
    """Run `export --ckpt_path FILE --output_dir DIR` and return the exit code.

    Args:
        argv: The command line after `export`.
    """
    parser = Arguments("python -m lit_klrb export", description=__doc__)
    parser.add_argument("--ckpt_path", required=True, metavar="FILE", help="a checkpoint written by fit")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="the folder to write")
    arguments = parser.parse_args(argv)
    from lit_klrb.models.loading import silence

    silence()
    export_checkpoint(arguments.ckpt_path, arguments.output_dir)
    print(arguments.output_dir)
    return 0
