"""The version of Weft: the only place that names it (pyproject.toml and CMakeLists.txt read this file)."""

__version__ = "0.1.0"
