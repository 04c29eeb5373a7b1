"""Run pyright and make sure that it looked at everything.

Pyright does not walk into links it finds by itself: a folder that is missing from its `include`
would pass unread, and nobody would notice.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cluster", "workers", "kernels", "router", "tests")


def main() -> int:
    result = subprocess.run(
        [Path(sys.executable).parent / "pyright", "--outputjson"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        report = json.loads(result.stdout)
    except json.JSONDecodeError:
        print(result.stdout, result.stderr, sep="\n")
        return 1
    for finding in report["generalDiagnostics"]:
        line = finding["range"]["start"]["line"] + 1 if "range" in finding else 1
        print(f"{finding['file']}:{line}: {finding['severity']}: {finding['message']}")
    summary = report["summary"]
    expected = 1 + sum(1 for folder in FOLDERS for _ in (ROOT / folder).rglob("*.py"))
    print(
        f"pyright: {summary['filesAnalyzed']} of {expected} files, {summary['errorCount']} errors"
    )
    if summary["filesAnalyzed"] < expected:
        print("pyright did not see every file: name the missing folder in [tool.pyright] include.")
        return 1
    return 1 if summary["errorCount"] else 0


if __name__ == "__main__":
    sys.exit(main())
