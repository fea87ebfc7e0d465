"""`python -m ratchet.cli`."""

from ratchet.cli import main

main()
