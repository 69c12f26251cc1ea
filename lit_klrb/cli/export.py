"""`python -m lit_klrb export`: writes a checkpoint as a folder that `transformers` loads."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from lit_klrb.cli.arguments import Arguments
from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import local_path, new_folder

CARD = "README.md"
# The other files of an export. A folder with any other file is never replaced.
EXPORTED = re.compile(
    r"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|chat_template\.jinja|additional_chat_templates|SHA256SUMS|adapter_config\.json|adapter_model\.safetensors"
)


def export_checkpoint(ckpt_path: str, output_dir: str, adapter: bool = False) -> None:
    """Write the policy of a checkpoint as a folder, with a model card.

    The folder is created atomically and replaces an earlier export. SHA256SUMS has the checksums of its
    weights. The card (README.md) states reference, estimator, beta, and the KL of the run's last evaluation.

    Args:
        ckpt_path: A checkpoint written by `fit`.
        output_dir: The folder to write: a new or an empty one, or an earlier export.
        adapter: Write the adapter alone, for `peft`, instead of merging it into the weights.
    """
    target = local_path(output_dir, "output_dir").resolve()
    check_target(target)
    from huggingface_hub.errors import StrictDataclassError

    from lit_klrb.models import loading
    from lit_klrb.models.adapters import has_adapter, merged
    from lit_klrb.models.folders import write_checksums
    from lit_klrb.run.card import initial_policy, model_card
    from lit_klrb.run.checkpoints import digest

    if not local_path(ckpt_path, "ckpt_path").exists():
        raise ConfigurationError(f"{ckpt_path} does not exist", key="ckpt_path")
    with loading.reading("ckpt_path", ckpt_path) as place:
        checkpoint = loading.read_checkpoint(place)
        model = loading.model_from_checkpoint(checkpoint)
        tokenizer = loading.tokenizer_from_files(checkpoint.get(loading.TOKENIZER_KEY))
    if adapter and not has_adapter(model):
        problem = f"{ckpt_path} has none: all weights were trained; leave it out"
        raise ConfigurationError(problem, key="adapter")
    if adapter:
        (config,) = model.peft_config.values()
        config.base_model_name_or_path = initial_policy(checkpoint)
    elif has_adapter(model):
        model = merged(model)
    card = model_card(checkpoint, Path(place).resolve().parent.parent, digest(checkpoint["state_dict"]))
    # transformers checks the settings that it saves
    checked = refusing(f"{ckpt_path} cannot be exported", ValueError, StrictDataclassError, key="ckpt_path")
    with (
        refusing(f"cannot write {output_dir}", OSError, key="output_dir"),
        new_folder(target, replace=True) as partial,
        checked,
    ):
        with warnings.catch_warnings():
            # peft looks for the configuration of the base model, which may be a checkpoint
            warnings.filterwarnings("ignore", "Could not find a config file in")
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / CARD).write_text(card, "utf-8")
        write_checksums(partial)


def check_target(target: Path) -> None:
    """Check that a path is free, an empty folder, or an earlier export."""
    from lit_klrb.run.card import is_own_card

    key = "output_dir"
    if target == Path.cwd():
        raise ConfigurationError(f"{target} is the current directory; name a new folder", key=key)
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file; name a new folder", key=key)
    names = sorted(path.name for path in target.iterdir()) if target.exists() else []
    own = {name for name in names if name == CARD and is_own_card(target / name)}
    foreign = [name for name in names if not (EXPORTED.fullmatch(name) or name in own)]
    if foreign or (names and not {"config.json", "adapter_config.json"} & {*names}):
        problem = f"{target} contains {(foreign or names)[0]} and is not an earlier export"
        raise ConfigurationError(f"{problem}; name a new folder", key=key)


def main(argv: Sequence[str]) -> int:
    """Run `export --ckpt_path FILE --output_dir DIR` and return the exit code."""
    parser = Arguments("export", __doc__)
    parser.add_argument("--ckpt_path", required=True, metavar="FILE", help="a checkpoint written by fit")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="the folder to write")
    alone = "write the adapter alone instead of merging it into the weights"
    parser.add_argument("--adapter", action="store_true", help=alone)
    arguments = parser.parse_args(argv)
    from lit_klrb.models.loading import silence

    silence()
    export_checkpoint(arguments.ckpt_path, arguments.output_dir, arguments.adapter)
    print(arguments.output_dir)
    return 0
