"""Memory that Weft takes on a rank. Needs neither torch nor a GPU nor ranks."""
