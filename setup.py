"""The one thing pyproject.toml cannot say: compiled helpers that may be left out."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "peercache.memory._scatter",
            ["src/peercache/memory/_scatter.c"],
            extra_compile_args=["-O3"],
            # Without a compiler everything works, and copies are slower.
            optional=True,
        ),
        Extension(
            "peercache.fabric.tcp._tcp",
            ["src/peercache/fabric/tcp/_receiving.c", "src/peercache/fabric/tcp/_serving.c"],
            extra_compile_args=["-O3", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
    ]
)
