/* A stand-in for libnvrtc.so.13 beside cuda_driver.c: "compiles" a source to the name of its kernel, which is all that
 * the stand-in driver needs. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

enum { SUCCESS = 0, OUT_OF_MEMORY = 1, INVALID_INPUT = 3, COMPILATION = 6 };

struct program {
    char function[64];
    char code[128];
    char log[128];
};

static int programs;

/* How many there are. */
EXPORTED int stand_in_programs(void);
EXPORTED int stand_in_programs(void) { return __atomic_load_n(&programs, __ATOMIC_RELAXED); }

EXPORTED int nvrtcVersion(int *major, int *minor);
EXPORTED int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

EXPORTED const char *nvrtcGetErrorString(int result);
EXPORTED const char *nvrtcGetErrorString(int result) { return result ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }

EXPORTED int nvrtcCreateProgram(struct program **out, const char *source, const char *name, int header_count, const char *const *headers,
                                const char *const *header_names);
EXPORTED int nvrtcCreateProgram(struct program **out, const char *source, const char *name, int header_count, const char *const *headers,
                                const char *const *header_names)
{
    (void)name, (void)header_count, (void)headers, (void)header_names;
    struct program *program = calloc(1, sizeof *program);
    if (!program) return OUT_OF_MEMORY;
    const char *kernel = strstr(source, "__launch_bounds__(1024) ");
    if (kernel) sscanf(kernel, "__launch_bounds__(1024) %63[a-z_]", program->function);
    *out = program;
    __atomic_add_fetch(&programs, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

EXPORTED int nvrtcCompileProgram(struct program *program, int option_count, const char *const *options);
EXPORTED int nvrtcCompileProgram(struct program *program, int option_count, const char *const *options)
{
    int architecture = 0;
    for (int i = 0; i < option_count; i++) architecture |= !strncmp(options[i], "--gpu-architecture=sm_", 22);
    if (!architecture || !*program->function || getenv("CUDA_DRIVER_NVRTC_FAILS")) {
        snprintf(program->log, sizeof program->log, "no kernel, or no architecture");
        return COMPILATION;
    }
    snprintf(program->code, sizeof program->code, "stand-in cubin with %s", program->function);
    return SUCCESS;
}

EXPORTED int nvrtcGetCUBINSize(struct program *program, size_t *size);
EXPORTED int nvrtcGetCUBINSize(struct program *program, size_t *size)
{
    *size = strlen(program->code) + 1;
    return *program->code ? SUCCESS : INVALID_INPUT;
}

EXPORTED int nvrtcGetCUBIN(struct program *program, char *code);
EXPORTED int nvrtcGetCUBIN(struct program *program, char *code)
{
    memcpy(code, program->code, strlen(program->code) + 1);
    return SUCCESS;
}

EXPORTED int nvrtcGetProgramLogSize(struct program *program, size_t *size);
EXPORTED int nvrtcGetProgramLogSize(struct program *program, size_t *size)
{
    *size = strlen(program->log) + 1;
    return SUCCESS;
}

EXPORTED int nvrtcGetProgramLog(struct program *program, char *log);
EXPORTED int nvrtcGetProgramLog(struct program *program, char *log)
{
    memcpy(log, program->log, strlen(program->log) + 1);
    return SUCCESS;
}

EXPORTED int nvrtcDestroyProgram(struct program **program);
EXPORTED int nvrtcDestroyProgram(struct program **program)
{
    free(*program);
    __atomic_sub_fetch(&programs, 1, __ATOMIC_RELAXED);
    *program = NULL;
    return SUCCESS;
}
