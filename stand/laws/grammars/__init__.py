"""Which tokens may follow a text: grammars of other libraries, functions, ends of thoughts."""
