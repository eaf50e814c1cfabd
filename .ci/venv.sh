# Sourced by run.sh and test.sh. prepare_venv KIND makes .venv in the tree's root and installs the package into it, editable;
# KIND "run" installs what running needs, "dev" the tools of the checks too. Done once, it returns at once.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

say() { printf 'ddllm_vk: %s\n' "$*" >&2; }
give_up() { say "$*"; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if command -v "$name" >/dev/null 2>&1 && new_enough "$name"; then
            printf '%s' "$name"
            return
        fi
    done
    return 1
}

# Installs Debian packages when that is possible without asking for a password nobody can type.
apt_install() {
    local as_root=()
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null 2>&1 || return 1
        if [ -t 0 ]; then as_root=(sudo); elif sudo -n true 2>/dev/null; then as_root=(sudo -n); else return 1; fi
    fi
    say "installing $* with apt-get"
    "${as_root[@]}" apt-get update -qq >&2 && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq -o Dpkg::Use-Pty=0 --no-install-recommends "$@" >&2
}

prepare_venv() {
    local kind=$1 extra="" stamp="$venv/ddllm_vk-installed" wanted python version
    [ "$kind" = dev ] && extra="[dev]"
    wanted="$root $(sha256sum <"$root/pyproject.toml")"
    if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; then
        case "$(cat "$stamp")" in
            "$wanted dev") return ;;
            "$wanted run") [ "$kind" = run ] && return ;;
        esac
    fi
    if ! new_enough "$venv/bin/python" || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        python=$(find_python) || { apt_install python3 python3-venv && python=$(find_python); } ||
            give_up "needs Python 3.11 or newer; install python3 and python3-venv and run this again"
        if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
            apt_install "python$version-venv" || apt_install python3-venv ||
                give_up "needs Python's venv module; install python$version-venv and run this again"
        fi
        say "making $venv with $("$python" --version)"
        "$python" -m venv "$venv" >&2 || give_up "python -m venv failed, see above"
    fi
    # compat: the tree itself goes on the path. The default, an import hook, loses to a folder that happens to be called
    # ddllm_vk in the current directory, which the checkout is for everything beside it.
    say "installing the package and what it needs into .venv (a few minutes the first time)"
    rm -f "$stamp"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        --config-settings editable_mode=compat -e "$root$extra" </dev/null >&2 ||
        give_up "pip could not install the package, see above; run this again once that is solved"
    printf '%s %s' "$wanted" "$kind" >"$stamp"
}
