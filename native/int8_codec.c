/* Owns the choice of an int8 variant for this CPU. */
#include "int8_codec.h"

#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

static bool has_f16c(void) /* a name that __builtin_cpu_supports of older clang does not know */
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

static const mzd_int8_variant *const with_avx2[] = {&mzd_int8_avx2, &mzd_int8_plain, NULL};

const mzd_int8_variant *const *mzd_int8_variants(void)
{
    __builtin_cpu_init();
    /* "avx2" covers the OS too: it must save the wide registers on a context switch. */
    const bool runs_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    return runs_avx2 ? with_avx2 : with_avx2 + 1;
}

#elif defined(__aarch64__)

static const mzd_int8_variant *const with_neon[] = {&mzd_int8_neon, &mzd_int8_plain, NULL};

const mzd_int8_variant *const *mzd_int8_variants(void)
{
    return with_neon;
}

#else

static const mzd_int8_variant *const plain_only[] = {&mzd_int8_plain, NULL};

const mzd_int8_variant *const *mzd_int8_variants(void)
{
    return plain_only;
}

#endif

const mzd_int8_variant *mzd_int8_variant_named(const char *name)
{
    const mzd_int8_variant *const *variants = mzd_int8_variants();
    if (strcmp(name, "auto") == 0)
        return variants[0];
    while (*variants != NULL && strcmp((*variants)->name, name) != 0)
        variants++;
    return *variants;
}
