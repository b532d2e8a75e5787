"""The commands of the `foresay` command line, one module each."""
