"""The command line; see `lit_klrb.cli`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if str(Path.cwd()) not in sys.path:  # with PYTHONSAFEPATH, as in processes that `lit-klrb` starts
        sys.path.append(str(Path.cwd()))
    from lit_klrb.cli.main import main

    sys.exit(main())
