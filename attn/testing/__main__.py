"""`python -m attn.testing`: the suite's command line."""

import sys

from attn.testing.command import main

sys.exit(main())
