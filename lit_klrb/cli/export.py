"""`lit-klrb export`: writes a checkpoint as a folder that `transformers` loads."""

import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_klrb.cli.arguments import Arguments
from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import local_path, new_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

CARD = "README.md"
# The other files of an export. A folder without its card, or with any other file, is never replaced.
EXPORTED = re.compile(
    r"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|chat_template\.jinja|additional_chat_templates|SHA256SUMS|adapter_config\.json|adapter_model\.safetensors"
)
# Completions per prompt for the KL of rounding, and their length if the training sampled none.
COMPLETIONS, LENGTH = 4, 64


def export_checkpoint(
    ckpt_path: str,
    output_dir: str,
    adapter: bool = False,
    dtype: str | None = None,
    license: str | None = None,
) -> str:
    """Write the policy of a checkpoint as a folder, with a model card.

    The folder is created atomically and replaces an earlier export. SHA256SUMS has the checksums of its
    weights. The card (README.md) has the hub's metadata, reference, estimator and beta, and reward and KL of
    the run's last evaluation with intervals.

    Args:
        ckpt_path: A checkpoint written by `fit`.
        output_dir: The folder to write: a new or an empty one, or an earlier export.
        adapter: Write the adapter alone, for `peft`, instead of merging it into the weights.
        dtype: That of the weights, such as "bfloat16", or "auto", that of the file from which the training
            started; None for that in which they were trained.
        license: The weights' licence for the card, by the hub's name, such as "apache-2.0".

    Returns:
        One line on the dtype, and on what rounding does to the weights.
    """
    target = local_path(output_dir, "output_dir").resolve()
    check_target(target)

    from lit_klrb.models import loading
    from lit_klrb.models.adapters import has_adapter, merged
    from lit_klrb.models.folders import write_checksums
    from lit_klrb.run.card import initial_policy, is_licence, model_card
    from lit_klrb.run.checkpoints import digest

    if license is not None and not is_licence(license):
        problem = f"{license}: a name of the hub's list is expected, such as apache-2.0, llama3.2 or other"
        raise ConfigurationError(problem, key="license")
    if not local_path(ckpt_path, "ckpt_path").exists():
        raise ConfigurationError(f"{ckpt_path} does not exist", key="ckpt_path")
    with loading.reading("ckpt_path", ckpt_path) as local:
        checkpoint = loading.read_checkpoint(local)
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
    line = _converted(model, checkpoint, dtype)
    run, weights = Path(local).resolve().parent.parent, digest(checkpoint["state_dict"])
    card = model_card(checkpoint, run, weights, license, adapter)
    with (
        refusing(f"cannot write {output_dir}", OSError, key="output_dir"),
        new_folder(target, replace=True) as partial,
    ):
        with warnings.catch_warnings():
            # peft looks for the configuration of the base model, which may be a checkpoint
            warnings.filterwarnings("ignore", "Could not find a config file in")
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / CARD).write_text(card, "utf-8")
        write_checksums(partial)
    return line


def _converted(model: "PreTrainedModel", checkpoint: dict[str, Any], asked: str | None) -> str:
    """Convert the weights of a trained model from float32; returns one line on what that does."""
    import torch

    from lit_klrb.models.dtypes import convert, file_dtype, rounding

    trained = max(
        (value.dtype for value in checkpoint["state_dict"].values()), key=lambda kind: kind.itemsize
    )
    file = file_dtype(model) or trained
    dtype = {None: trained, "auto": file}.get(asked) or getattr(torch, str(asked))
    names = [str(kind).removeprefix("torch.") for kind in (dtype, trained, file)]
    line = f"weights in {names[0]}, trained in {names[1]}"
    if (loss := rounding(model, dtype, {})).changed:
        before = _initial_weights(checkpoint)
        loss = rounding(model, dtype, before or {})
        line += f"; rounding changes {loss.changed} of them"
        if before == {}:
            line += "; how many updates it undoes is not known, as the initial policy is not on this machine"
        elif loss.moved:
            line += (
                f" and undoes {loss.lost / loss.moved:.1%} of the updates, those below half a unit in the "
            )
            line += "last place"
    elif asked is None and file != dtype:
        line += f"; --dtype auto writes {names[2]}, as in the file that the training started from"
    convert(model, dtype)
    return line


def _initial_weights(checkpoint: dict[str, Any]) -> dict[str, "Tensor"] | None:
    """The weights from which a training started, by name; empty if not on this machine, None if new."""
    from huggingface_hub import snapshot_download

    from lit_klrb.models import loading
    from lit_klrb.models.adapters import has_adapter, merged
    from lit_klrb.models.backbones import with_layers
    from lit_klrb.run.card import initial_policy

    path, settings = initial_policy(checkpoint), checkpoint.get("hyper_parameters")
    if path is None or not isinstance(settings, dict) or settings.get("policy_config"):
        return None
    with suppress(Exception):  # of what a checkpoint names, which others may have written
        folder = path if loading.looks_local(path) else snapshot_download(path, local_files_only=True)
        model = loading.load_model("policy_path", folder)
        model = merged(model) if has_adapter(model) else model
        layers = settings.get("policy_layers")
        model = with_layers(model, layers) if layers else model
        return {name: weight.data.float() for name, weight in model.named_parameters()}
    return {}


def _kl_of_rounding(ckpt_path: str, output_dir: str, prompts: str) -> str:
    """One line on the KL of the trained policy to the exported one, on completions of prompts."""
    from lit_klrb.comparison.compare import ModelComparison
    from lit_klrb.comparison.estimates import RB
    from lit_klrb.engine.generation import Sampling
    from lit_klrb.models import loading

    settings = loading.read_checkpoint(ckpt_path).get("hyper_parameters")
    length = settings.get("max_new_tokens") if isinstance(settings, dict) else None
    models: dict[str, Any] = {"policy": ckpt_path, "reference": output_dir, "prompts": prompts}
    sampling = Sampling(COMPLETIONS, length if isinstance(length, int) else LENGTH)
    comparison = ModelComparison(**models, directions=("forward",), sampling=sampling)
    table = comparison.run(lambda *_: lambda rows: None).tables["forward"]
    estimate = table.estimates(level=0.95)[RB]["sequence"]
    about = f"± {estimate.error:.1g} nats per completion ({table.clusters} prompts; more by the command kl)"
    return f"KL(trained‖exported) {estimate.value:.2g} {about}"


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
    if foreign or (names and not own):
        problem = f"{target} contains {(foreign or names)[0]} and is not an earlier export"
        raise ConfigurationError(f"{problem}; name a new folder", key=key)


def main(argv: Sequence[str]) -> int:
    """Run `export --ckpt_path FILE --output_dir DIR` and return the exit code."""
    parser = Arguments("export", __doc__)
    parser.add_argument("--ckpt_path", required=True, metavar="FILE", help="a checkpoint written by fit")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="the folder to write")
    alone = "write the adapter alone instead of merging it into the weights"
    parser.add_argument("--adapter", action="store_true", help=alone)
    kinds = ("float32", "bfloat16", "float16", "auto")
    of = "dtype of the weights: by default that in which they were trained; auto is that of the initial file"
    parser.add_argument("--dtype", choices=kinds, help=of)
    parser.add_argument("--license", metavar="NAME", help="of the weights, for the card, such as apache-2.0")
    parser.add_argument("--prompts", metavar="FILE", help="prompts for the KL that rounding makes, as of kl")
    arguments = parser.parse_args(argv)
    if arguments.adapter and arguments.prompts:
        raise ConfigurationError("not with --adapter, which is no whole model", key="prompts")
    from lit_klrb.models.loading import silence

    silence()
    options = vars(arguments)
    prompts = options.pop("prompts")
    print(export_checkpoint(**options), file=sys.stderr)
    if prompts is not None:
        print(_kl_of_rounding(arguments.ckpt_path, arguments.output_dir, prompts), file=sys.stderr)
    print(arguments.output_dir)
    return 0
