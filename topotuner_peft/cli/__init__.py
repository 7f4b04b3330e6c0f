"""What each `topotuner` command does; the parser is in `topotuner_cli`."""
