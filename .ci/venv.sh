# Sourced by run.sh and test.sh. prepare_venv KIND makes .venv in the tree's root and installs the package into it, editable;
# KIND "run" installs what running needs, "dev" the tools of the checks too. prepare_gpu KIND adds what the GPU layer can use:
# nothing there is needed to run, and what cannot be had is said and left out. Done once, both return at once.

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

has_library() { ldconfig -p 2>/dev/null | grep -qF "$1" || [ -n "$(find /usr/lib /usr/local/lib -name "$1" -print -quit 2>/dev/null)" ]; }
has_file() { compgen -G "$1" >/dev/null; }
has_python_headers() {
    "$venv/bin/python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}
can_build_kompute() {
    command -v cmake >/dev/null 2>&1 && command -v g++ >/dev/null 2>&1 && has_python_headers &&
        { has_file "/usr/include/vulkan/vulkan.hpp" || has_file "/usr/local/include/vulkan/vulkan.hpp"; } &&
        { has_file "/usr/include/fmt/format.h" || has_file "/usr/local/include/fmt/format.h"; }
}

# For "dev": a software device, the validation layers, and what Kompute is built with, as Debian packages if need be. For both:
# Kompute, where it can be built. The package runs on the GPU without it, through the `vulkan` runtime.
prepare_gpu() {
    local kind=$1 built headers=python3-dev
    built="$venv/kompute-$(sha256sum <"$root/.ci/build_kompute.py" | cut -c1-16)"
    if [ "$kind" = dev ]; then
        if ! has_library libvulkan.so.1 || ! has_file "/usr/share/vulkan/icd.d/*.json" ||
            ! has_file "/usr/share/vulkan/explicit_layer.d/*validation*.json"; then
            apt_install mesa-vulkan-drivers libvulkan1 vulkan-validationlayers ||
                say "no Vulkan driver or validation layer could be installed: tests on the GPU layer will be skipped"
        fi
        if [ ! -e "$built" ] && ! can_build_kompute; then
            has_python_headers || headers="python$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev"
            apt_install cmake g++ make libvulkan-dev libfmt-dev "$headers" || true
        fi
    fi
    [ -e "$built" ] && return
    if [ "$kind" = run ] && ! has_file "/dev/dri/renderD*" && ! has_file "/dev/nvidia0"; then
        return 0 # no GPU to use it with
    fi
    if ! can_build_kompute; then
        [ "$kind" = run ] || say "Kompute cannot be built here (needs cmake, g++, Vulkan, fmt and Python headers): left out"
        return 0
    fi
    say "building Kompute, one of the two ways to the GPU (1 to 3 minutes, once)"
    if "$venv/bin/python" "$root/.ci/build_kompute.py" "$venv/kompute" >"$venv/kompute.log" 2>&1 </dev/null &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps --force-reinstall \
            "$venv"/kompute/kp-*.whl </dev/null >>"$venv/kompute.log" 2>&1; then
        say "Kompute is installed"
    else
        say "Kompute could not be built (see $venv/kompute.log): left out"
    fi
    touch "$built"
}
