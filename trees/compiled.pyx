"""What lookups are given, checked, and drafts as serving engines take them: one compiled module of both parts, because
each module by itself takes 6 kB of the wheel."""

include "checked_arrays.pxi"
include "layouts/layout.pxi"
