/* A CUDA driver that computes nothing and writes down what it is asked for, one line a call.
 *
 * A "cubin" is a string with one letter for each parameter of its kernel: p for a pointer, i for an int32. Launches on stream -1
 * fail. Without the environment variables DRIVER_GPU_SM and DRIVER_GPU_NAME the device is an "NVIDIA H200" of compute capability
 * 9.0; with DRIVER_NUM_GPUS=0 there is none. Between the begin of a stream's capture and its end nothing can be loaded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NO_DEVICE = 100,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76
};

struct Kernel {
    char name[64];
    char parameters[64];
};

static struct Kernel kernels[64];
static unsigned num_kernels;
static int is_capturing;
static char log_text[1 << 20];
static size_t log_size;

static void note(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    log_size += vsnprintf(log_text + log_size, sizeof log_text - log_size, format, arguments);
    va_end(arguments);
}

const char *driver_log(void) { return log_text; }

Result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (status)
        *status = *function ? 0 : 1;
    return SUCCESS;
}

static int number(const char *variable, int otherwise)
{
    const char *text = getenv(variable);
    return text ? atoi(text) : otherwise;
}

Result cuInit(unsigned flags) { return number("DRIVER_NUM_GPUS", 1) ? SUCCESS : NO_DEVICE; }

Result cuDeviceGetCount(int *count)
{
    *count = number("DRIVER_NUM_GPUS", 1);
    return SUCCESS;
}

Result cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return SUCCESS;
}

Result cuDeviceGetName(char *name, int size, int device)
{
    const char *given = getenv("DRIVER_GPU_NAME");
    snprintf(name, size, "%s", given ? given : "NVIDIA H200");
    return SUCCESS;
}

Result cuDeviceTotalMem(size_t *bytes, int device)
{
    *bytes = (size_t)48 << 30;
    return SUCCESS;
}

Result cuDriverGetVersion(int *version)
{
    *version = 13000;
    return SUCCESS;
}

Result cuGetErrorString(Result error, const char **text)
{
    *text = error == NO_DEVICE                    ? "no CUDA-capable device is detected"
            : error == STREAM_CAPTURE_UNSUPPORTED ? "operation not permitted when stream is capturing"
                                                  : "invalid argument";
    return SUCCESS;
}

Result cuCtxGetDevice(int *device)
{
    *device = 0;
    return SUCCESS;
}

Result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    int sm = number("DRIVER_GPU_SM", 90);
    *value = attribute == CAPABILITY_MAJOR ? sm / 10 : attribute == CAPABILITY_MINOR ? sm % 10 : 0;
    return SUCCESS;
}

Result cuStreamBeginCapture(void *stream, int mode)
{
    is_capturing = 1;
    return SUCCESS;
}

Result cuStreamEndCapture(void *stream, void **graph)
{
    is_capturing = 0;
    return SUCCESS;
}

Result cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f)
{
    if (is_capturing)
        return STREAM_CAPTURE_UNSUPPORTED;
    note("load\n");
    snprintf(kernels[num_kernels].parameters, sizeof kernels[0].parameters, "%s", (const char *)code);
    *library = &kernels[num_kernels++];
    return SUCCESS;
}

Result cuLibraryGetKernel(void **kernel, void *library, const char *name)
{
    struct Kernel *found = library;
    snprintf(found->name, sizeof found->name, "%s", name);
    *kernel = found;
    return SUCCESS;
}

Result cuKernelSetAttribute(int attribute, int value, void *kernel, int device)
{
    note("attribute %s %d %d\n", ((struct Kernel *)kernel)->name, attribute, value);
    return SUCCESS;
}

Result cuKernelGetFunction(void **function, void *kernel)
{
    *function = kernel;
    return SUCCESS;
}

Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared_bytes, void *stream, void **parameters, void **extra)
{
    struct Kernel *kernel = function;
    if (stream == (void *)-1)
        return INVALID_VALUE;
    note("launch %s %u,%u,%u %u,%u,%u %u %lx", kernel->name, gx, gy, gz, bx, by, bz, shared_bytes, (unsigned long)stream);
    for (unsigned index = 0; kernel->parameters[index]; index++) {
        uint64_t value = 0;
        memcpy(&value, parameters[index], kernel->parameters[index] == 'p' ? 8 : 4);
        note(" %lx", value);
    }
    note("\n");
    return SUCCESS;
}
