"""Weft inside of other libraries. Each module needs its library; importing it registers Weft there."""
