"""What pyproject.toml cannot say: how the compiled library is built, and which wheels carry it."""

import os
import runpy
import shlex
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

PACKAGE = Path("src/peercache")
TLS_NAME = "peercache.installation.libpeercache_tls"
# Release wheels carry OpenSSL inside, and are never without it.
IS_RELEASE = os.environ.get("PEERCACHE_STATIC_OPENSSL") == "1"
OPENSSL = ("ssl", "crypto")
_sources = runpy.run_path(os.fspath(PACKAGE / "installation" / "sources.py"))

NO_COMPILER = """\
PeerCache is partly written in C, and {compiler} is not installed here.
Install a C compiler (Debian, Ubuntu: apt-get install gcc libc6-dev; Red Hat: dnf install gcc),
or install a wheel of peercache-kv, which needs none."""
NO_OPENSSL = """\
PeerCache is installed without TLS: its part with OpenSSL could not be compiled; the messages are
above. For TLS install OpenSSL's headers (Debian, Ubuntu: apt-get install libssl-dev; Red Hat: dnf
install openssl-devel), and install PeerCache again."""
NOT_COMPILED = """\
PeerCache is partly written in C, and {compiler} could not compile it; its messages are above.
If it does not find a header such as errno.h, install libc6-dev (Red Hat: glibc-devel)."""


class BuildLibrary(build_ext):
    """Builds a plain shared library: no module of Python's, so its name has no tag."""

    def finalize_options(self) -> None:
        """Compile always: a newer library may still be of other sources."""
        super().finalize_options()
        self.force = True

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path below the build folder."""
        return os.fspath(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Compile; where that fails, say what to install in a sentence instead of a traceback."""
        compiler = self.compiler.compiler_so[0]
        # Python's own flags would write the folders of this machine into the library.
        flags = shlex.split(os.environ.get("LDFLAGS", ""))
        self.compiler.set_executables(linker_so=[compiler, "-shared", *flags])
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError):
            if ext.name == TLS_NAME and not IS_RELEASE:
                # An older library would be of other sources.
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
                sys.stderr.write(f"\n{NO_OPENSSL}\n")
                return
            text = NOT_COMPILED if shutil.which(compiler) else NO_COMPILER
            sys.exit("\n" + text.format(compiler=compiler))


class BuildLibraryFirst(build):
    """Builds the library before pip is told of every copied file: its error stands out."""

    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


class AnyPythonWheel(bdist_wheel):
    """The library is called through ctypes: one wheel fits every Python of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tag."""
        return "py3", "none", super().get_tag()[2]


def _identity(sources: tuple[str, ...]) -> list[tuple[str, str | None]]:
    return [("PEERCACHE_SOURCES", f'"{_sources["digest_of"](PACKAGE, sources)}"')]


def _static_openssl() -> list[str]:
    """Return how OpenSSL is linked in, so that none of its names meets another one's."""
    archives = [f"-l:lib{name}.a" for name in OPENSSL]
    exports = PACKAGE / "installation" / "exports.map"
    # zig's linker knows no --exclude-libs, so the names to show are listed.
    return [*archives, "-ldl", f"-Wl,--version-script={exports}", "-Wl,-Bsymbolic", "-s"]


_headers = [os.fspath(PACKAGE / name) for name in _sources["HEADERS"]]
_flags = ["-std=gnu11", "-O3", "-pthread"]

setup(
    cmdclass={"build": BuildLibraryFirst, "build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel},
    ext_modules=[
        Extension(
            "peercache.installation.libpeercache",
            [os.fspath(PACKAGE / name) for name in _sources["SOURCES"]],
            depends=_headers,
            define_macros=_identity(_sources["SOURCES"]),
            extra_compile_args=_flags,
            extra_link_args=["-pthread"],
        ),
        # A file of its own: the other one is loaded where no OpenSSL is.
        Extension(
            TLS_NAME,
            [os.fspath(PACKAGE / name) for name in _sources["TLS_SOURCES"]],
            depends=_headers,
            define_macros=_identity(_sources["TLS_SOURCES"]),
            extra_compile_args=_flags,
            optional=not IS_RELEASE,
            libraries=[] if IS_RELEASE else list(OPENSSL),
            extra_link_args=["-pthread", *(_static_openssl() if IS_RELEASE else [])],
        ),
    ],
)
