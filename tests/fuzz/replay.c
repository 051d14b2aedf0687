/* Runs the inputs that are named, for compilers without libFuzzer. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int count, char **names)
{
    for (int i = 1; i < count; i++) {
        static uint8_t data[1 << 20];
        printf("%s\n", names[i]); /* the last one is at fault if the process dies */
        fflush(stdout);
        FILE *file = fopen(names[i], "rb");
        if (!file) return 1;
        size_t size = fread(data, 1, sizeof data, file);
        fclose(file);
        uint8_t *exact = malloc(size ? size : 1);
        if (!exact) return 1;
        for (size_t at = 0; at < size; at++) exact[at] = data[at];
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    return 0;
}
