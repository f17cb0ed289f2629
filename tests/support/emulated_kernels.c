/* Calls functions of shared libraries for another process: reads calls from standard input, with the memory
 * that they take, and writes what they returned and the memory that they changed.
 *
 * emulated_kernels.py starts it under qemu-aarch64, so that kernels built for aarch64 run on inputs of x86. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

typedef struct {
    uint64_t address, size;
    uint8_t *memory, *before;
} Region;

static void get(void *to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1) exit(0); /* the caller has ended */
}

static uint64_t number(void) {
    uint64_t value;
    get(&value, sizeof value);
    return value;
}

static char *text(void) {
    uint64_t size = number();
    char *value = calloc(size + 1, 1);
    get(value, size);
    return value;
}

static void put(const void *from, size_t size) { fwrite(from, size, 1, stdout); }

/* Memory with the given address's offset within 64 bytes, so that unaligned data stays unaligned. */
static uint8_t *allocate(uint64_t address, uint64_t size) {
    uint8_t *memory = aligned_alloc(64, (size + 127) / 64 * 64);
    return memory + address % 64;
}

void llmopt_pool_run(void (*work)(void *), void *argument, unsigned threads, unsigned flags);

static void serve(void) {
    char *library = text(), *name = text();
    void *opened = dlopen(library, RTLD_NOW);
    void *function = opened ? dlsym(opened, name) : NULL;
    if (!function) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    void (*set_parallel)(void *) = (void (*)(void *))dlsym(opened, "llmopt_set_parallel");
    if (set_parallel) set_parallel((void *)llmopt_pool_run);
    uint64_t count = number();
    Region *regions = calloc(count + 1, sizeof(Region));
    for (uint64_t i = 0; i < count; i++) {
        Region *r = regions + i;
        r->address = number(), r->size = number();
        r->memory = allocate(r->address, r->size);
        get(r->memory, r->size);
    }
    for (uint64_t left = number(); left; left--) { /* pointers: where they are, and what they point at */
        uint64_t region = number(), offset = number(), target = number(), delta = number();
        uint8_t *to = regions[target].memory + delta;
        memcpy(regions[region].memory + offset, &to, sizeof to);
    }
    for (uint64_t i = 0; i < count; i++) {
        regions[i].before = malloc(regions[i].size);
        memcpy(regions[i].before, regions[i].memory, regions[i].size);
    }
    int64_t result = count ? ((int (*)(void *))function)(regions[0].memory) : ((int (*)(void))function)();
    put(&result, sizeof result);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t changed = memcmp(regions[i].before, regions[i].memory, regions[i].size) != 0;
        put(&changed, sizeof changed);
        if (changed) put(regions[i].memory, regions[i].size);
        free(regions[i].before);
        free(regions[i].memory - regions[i].address % 64);
    }
    fflush(stdout);
    free(regions), free(library), free(name);
}

int main(void) {
    uint64_t features[] = {getauxval(AT_HWCAP), getauxval(AT_HWCAP2)};
    put(features, sizeof features);
    fflush(stdout);
    for (;;) serve();
}
