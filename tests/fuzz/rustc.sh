#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of `cargo xtask fuzz`: compiles our own crates as
# libFuzzer needs them, and lets the others be what `cargo build` made of them.
#
# Coverage counters and traced comparisons are LLVM's own
# (https://clang.llvm.org/docs/SanitizerCoverage.html): no nightly compiler is
# needed. No sanitizer either: the parsers hold no unsafe code, and panics and
# overflows, which the dev profile checks for, are found without one.
case " $* " in
*" build_script_build "*) exec "$@" ;;
esac
exec "$@" --cfg fuzzing \
    -C passes=sancov-module \
    -C llvm-args=-sanitizer-coverage-level=4 \
    -C llvm-args=-sanitizer-coverage-inline-8bit-counters \
    -C llvm-args=-sanitizer-coverage-pc-table \
    -C llvm-args=-sanitizer-coverage-trace-compares
