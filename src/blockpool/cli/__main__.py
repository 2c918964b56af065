"""`python -m blockpool.cli`."""

from .app import main

main()
