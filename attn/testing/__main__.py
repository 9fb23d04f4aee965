"""`python -m attn.testing`: the command line of the conformance suite."""

import sys

from attn.testing.command import main

sys.exit(main())
