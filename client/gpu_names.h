/* Names of the driver functions of struct rg_api, in its order; for core.pyx alone. */
#ifndef RAILRELAY_GPU_NAMES_H
#define RAILRELAY_GPU_NAMES_H

#include "gpu_copy.h"

#define RG_NAME(name, arguments) #name,
static const char *const rg_function_names[] = {RG_FUNCTIONS(RG_NAME)};
#undef RG_NAME
static const uint32_t rg_function_count = sizeof rg_function_names / sizeof *rg_function_names;

#endif
