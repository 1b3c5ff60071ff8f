// Which sets of instructions the processor has; for files that are compiled for every processor.
//
// [Note: files for one set of instructions] The linker keeps one copy of each inline function and
// template, from the first object that has it. If a file compiled for AVX-512 uses std::vector, its
// copy of the vector's functions may be the one that all other files call, and they die of SIGILL
// where there is no AVX-512. A file that is compiled for one set of instructions therefore defines
// nothing with external linkage but a table of its kernels, which is data: no containers,
// algorithms or other templates of the standard library, scratch memory from scratch.hpp, and the
// choice between the tables in the module's own file. check_objects.py verifies this in the build.
#pragma once

namespace gulliver {

inline bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

inline bool has_avx2_f16c() {
#if defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

inline bool has_avx512() {
#if defined(__x86_64__)
  return has_avx2_f16c() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

inline bool has_avx512_vnni() {
#if defined(__x86_64__)
  return has_avx512() && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

inline bool has_avx512_bf16() {
#if defined(__x86_64__)
  return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Whether `vdpbf16ps` multiplies more values a second than float32 instructions do: Intel's starts
// every other cycle only, and a step of 8 sequences takes twice as long with it.
inline bool fast_bf16() {
#if defined(__x86_64__)
  return !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

}  // namespace gulliver
