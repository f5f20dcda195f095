"""How scripts measure and report: clocks, records, tables, drafters of the replay."""
