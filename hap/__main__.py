"""``python -m hap`` is the ``hap`` command."""

from hap.cli import main

main()
