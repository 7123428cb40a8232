"""`python -m draft_vectors module:Class`."""

import sys

from draft_vectors.runner import main

sys.exit(main())
