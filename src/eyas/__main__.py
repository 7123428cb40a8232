"""`python -m eyas` is `eyas`."""

from eyas.cli import main

main()
