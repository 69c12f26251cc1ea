"""The command line; see `lit_klrb.cli`."""

import sys

if __name__ == "__main__":
    from lit_klrb.cli.main import main

    sys.exit(main())
