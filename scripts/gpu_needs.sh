# Checks whether a script that needs GPUs can do its work here. Such scripts source this file and check before they begin. If
# something is missing, the script prints one line and ends with exit code 77.

lacks() {
  printf '[gpu] cannot be done here: %s\n' "$*" >&2
  exit 77
}

# need_gpus PYTHON NUM_RANKS
need_gpus() {
  local answer
  command -v "$1" >/dev/null || lacks "there is no $1: run scripts/setup_env.sh, or let PYTHON name an interpreter"
  answer="$("$1" -c 'import sys; from recipes.plan.devices import lacking
print("lacking:", lacking(int(sys.argv[1])))' "$2" 2>&1)" ||
    lacks "$1 does not load the package: $(tail -n 1 <<<"$answer")"
  # It has to answer: /bin/true, as many a program that is no Python, ends well whatever it is asked. Warnings come before.
  answer="$(tail -n 1 <<<"$answer")"
  [[ "$answer" == "lacking: "* ]] || lacks "$1 is no Python: let PYTHON name an interpreter"
  [ "$answer" = "lacking: " ] || lacks "${answer#lacking: }"
}

# need_module PYTHON MODULE "what brings it"
need_module() { "$1" -c "import $2" 2>/dev/null || lacks "$1 has no $2: $3"; }

# need_program PROGRAM "what brings it"
need_program() { command -v "$1" >/dev/null || lacks "$1 is not on PATH: $2"; }
