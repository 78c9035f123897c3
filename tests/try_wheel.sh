#!/bin/sh
# usage: try_wheel.sh PYTHON
# Builds the wheel into dist/, installs it in a fresh environment apart from the sources, and runs what it promises.
set -e
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -f dist/bespokefl-*.whl
"$1" -m venv "$work/venv"
pip="$work/venv/bin/python -m pip --disable-pip-version-check"
$pip wheel -q . --no-deps -w dist
$pip install -q --constraint constraints.txt dist/bespokefl-*.whl
cd "$work"
venv/bin/bespoke --version
venv/bin/bespoke list experiments | grep -q pgfed-table1
venv/bin/bespoke run --out out --set algorithms=[fedavg] --set seeds=[0] --set train.rounds=2
test -s out/report.html
test -f venv/lib/python3*/site-packages/bespokefl/flower/app/bespoke_app/server_app.py
echo "the wheel works"
