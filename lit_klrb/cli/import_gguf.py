"""`lit-klrb import-gguf`: writes a GGUF file as a folder that `transformers` loads."""

from collections.abc import Sequence

from lit_klrb.cli.arguments import Arguments
from lit_klrb.errors import ConfigurationError
from lit_klrb.files import local_path, remove_abandoned

EPILOG = """GGUF is the format of llama.cpp. The weights, often of 4 to 8 bits, become numbers of 32 bits, so
the folder is several times as large as the file. It has the tokenizer with the file's chat template,
checksums of the weights (SHA256SUMS) and a model card (README.md) that says where they come from. To train
or compare such a model, a path to the file is enough: --model.policy_path FILE.gguf converts it once, into
the cache.

example: lit-klrb import-gguf SmolLM2-135M-Instruct.Q4_1.gguf --output_dir runs/models/smollm2
"""


def main(argv: Sequence[str]) -> int:
    """Run `import-gguf FILE --output_dir DIR` and return the exit code."""
    parser = Arguments("import-gguf", __doc__, EPILOG)
    parser.add_argument("file", metavar="FILE", help="a .gguf file, or a folder with one")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="the folder to write, a new one")
    arguments = parser.parse_args(argv)
    target = local_path(arguments.output_dir, "output_dir").absolute()
    remove_abandoned(target)  # what a call left that was killed after it had made the folder
    if target.exists():
        raise ConfigurationError(f"{arguments.output_dir} exists; name a new folder", key="output_dir")
    from lit_klrb.models import gguf, loading

    loading.silence()
    with loading.errors_of("file", arguments.file):
        file = gguf.gguf_file(arguments.file)
        if file is None:
            raise ConfigurationError("neither a .gguf file nor a folder with one")
        gguf.import_gguf(file, target)
    print(arguments.output_dir)
    return 0
