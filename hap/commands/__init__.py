"""The commands of ``hap``, a module for each purpose; ``hap/cli.py`` puts them together. ``shared`` has the options
that several take and the few things that all do alike. Imports of torch stand inside the commands, so that ``hap
--help`` is quick."""
