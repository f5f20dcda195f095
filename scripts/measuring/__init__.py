"""How scripts measure and report: clocks, options, progress, files that a run writes, tables."""
