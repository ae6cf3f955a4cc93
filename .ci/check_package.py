"""What was built contains what it should, and nothing else: `check_package.py dist`."""

import pathlib
import subprocess
import sys
import tarfile
import zipfile

dist = pathlib.Path(sys.argv[1])
(wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
tracked = set(listed.stdout.splitlines())
name = sdist.name.removesuffix(".tar.gz")


def compare(what: str, found: set[str], expected: set[str]) -> None:
    """Ends with an error where files differ from those that are expected."""
    if found != expected:
        missing, extra = sorted(expected - found), sorted(found - expected)
        sys.exit(f"{what}: missing {missing}, should not be there: {extra}")
    print(f"{what}: {len(found)} files")


with zipfile.ZipFile(wheel) as archive:
    files = {path for path in archive.namelist() if not path.endswith("/")}
expected = {path for path in tracked if path.startswith("jmp_lite/")}
info = f"{name}.dist-info"
about = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}
compare(wheel.name, files, expected | {f"{info}/{path}" for path in about})

with tarfile.open(sdist) as archive:
    members = {member.name for member in archive.getmembers() if member.isfile()}
expected = {path for path in tracked if not path.startswith(".ci/")} | {"PKG-INFO"}
compare(sdist.name, members, {f"{name}/{path}" for path in expected})
