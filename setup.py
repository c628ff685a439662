"""The one thing pyproject.toml cannot say: compiled helpers that may be left out."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "peercache.segment._scatter",
            ["src/peercache/segment/_scatter.c"],
            extra_compile_args=["-O3"],
            # Without a compiler everything works, and copies are slower.
            optional=True,
        ),
        Extension(
            "peercache.fabric._tcp",
            ["src/peercache/fabric/_receiving.c", "src/peercache/fabric/_serving.c"],
            extra_compile_args=["-O3", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
    ]
)
