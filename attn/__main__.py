"""`python -m attn`: the command line."""

import sys

from attn.cli import main

sys.exit(main())
