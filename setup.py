"""The one thing pyproject.toml cannot say: a compiled helper that may be left out."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "peercache.segment._scatter",
            ["src/peercache/segment/_scatter.c"],
            extra_compile_args=["-O3"],
            # Without a compiler everything works, and copies are slower.
            optional=True,
        )
    ]
)
