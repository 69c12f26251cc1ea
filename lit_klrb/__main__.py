"""The command line; see `lit_klrb.cli`."""

import sys

if __name__ == "__main__":
    from lit_klrb.commands import main

    sys.exit(main())
