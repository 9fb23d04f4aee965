"""`python -m attn.testing`: `attn conform`, the command line of the conformance suite."""

import sys

from attn.cli import main

sys.exit(main(["conform", *sys.argv[1:]]))
