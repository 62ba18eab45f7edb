/* Stands in for NVIDIA's libnvidia-ml.so.1: answers from the text file beside it, read again at each call.

   hang                                     every call waits until this line is gone
   G|uuid|name|total|used|use|temperature|milliwatts|slowdowns|errors|status
   M|uuid|name|total|used                   a MIG slice of the card above
   X|index|number                           an Xid error; told once a second

   "-" stands for a figure that is not supported; a status other than 0 is what every call about the card returns. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 64
enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10 };
typedef unsigned long long u64;
typedef struct { int kind, index, card; char field[12][96]; } Line;
static Line lines[MOST];
static int count, hangs, xid_index, xid_number;

static void load(void) {
    static char path[1024];
    Dl_info info;
    if (!path[0] && dladdr((void *)load, &info)) snprintf(path, sizeof path, "%s.answers", info.dli_fname);
    do {
        FILE *file = fopen(path, "r");
        char text[1024];
        int cards = 0;
        count = hangs = 0;
        xid_number = 0;
        while (file && fgets(text, sizeof text, file)) {
            text[strcspn(text, "\n")] = 0;
            if (!strcmp(text, "hang")) hangs = 1;
            if (text[0] == 'X') sscanf(text, "X|%d|%d", &xid_index, &xid_number);
            if ((text[0] != 'G' && text[0] != 'M') || count == MOST) continue;
            Line *line = &lines[count++];
            memset(line, 0, sizeof *line);
            line->kind = text[0];
            char *rest = text, *part;
            for (int i = 0; i < 12 && (part = strsep(&rest, "|")); i++) snprintf(line->field[i], 96, "%s", part);
            line->index = line->kind == 'G' ? cards++ : cards - 1;
            line->card = line->kind == 'G' ? count - 1 : lines[count - 2].card;
        }
        if (file) fclose(file);
        if (hangs) usleep(50000);
    } while (hangs);
}

/* A handle is the number of a line, from 1 on. */
static Line *at(void *handle) { load(); return (size_t)handle && (int)(size_t)handle <= count ? &lines[(size_t)handle - 1] : 0; }
static int status(Line *line) { return line ? atoi(lines[line->card].field[10]) : INVALID; }
static int number(void *handle, int field, u64 *value) {
    Line *line = at(handle);
    if (status(line)) return status(line);
    if (!line->field[field][0] || line->field[field][0] == '-') return UNSUPPORTED;
    *value = strtoull(line->field[field], 0, 10);
    return OK;
}
static int small(void *handle, int field, unsigned *value) {
    u64 found = 0;
    int code = number(handle, field, &found);
    if (!code) *value = (unsigned)found;
    return code;
}
static int text(void *handle, int field, char *into, unsigned size) {
    Line *line = at(handle);
    if (status(line)) return status(line);
    snprintf(into, size, "%s", line->field[field]);
    return OK;
}

int nvmlInit_v2(void) { load(); return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : code == 3 ? "Not Supported" : "an error"; }
int nvmlDeviceGetCount_v2(unsigned *found) {
    load();
    *found = 0;
    for (int i = 0; i < count; i++) *found += lines[i].kind == 'G';
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    load();
    for (size_t i = 0; i < (size_t)count; i++)
        if (lines[i].kind == 'G' && lines[i].index == (int)index) { *handle = (void *)(i + 1); return status(&lines[i]); }
    return INVALID;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    load();
    for (size_t i = 0; i < (size_t)count; i++)
        if (!strcmp(lines[i].field[1], uuid)) { *handle = (void *)(i + 1); return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(void *handle, unsigned *index) { Line *line = at(handle); *index = line ? line->index : 0; return line ? OK : INVALID; }
int nvmlDeviceGetUUID(void *handle, char *into, unsigned size) { return text(handle, 1, into, size); }
int nvmlDeviceGetName(void *handle, char *into, unsigned size) { return text(handle, 2, into, size); }
int nvmlDeviceGetMemoryInfo(void *handle, u64 *memory) {
    int code = number(handle, 3, &memory[0]);
    if (!code) code = number(handle, 4, &memory[2]);
    memory[1] = memory[0] - memory[2];
    return code;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) { rates[1] = 0; return small(handle, 5, &rates[0]); }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *value) { return sensor ? INVALID : small(handle, 6, value); }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *value) { return small(handle, 7, value); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, u64 *value) { return number(handle, 8, value); }
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, u64 *value) { return type == 1 && counter == 0 ? number(handle, 9, value) : INVALID; }
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *later) {
    Line *line = at(handle);
    if (status(line)) return status(line);
    *now = *later = line + 1 < lines + count && line[1].kind == 'M';
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *most) { *most = 7; return status(at(handle)); }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **part) {
    size_t i = (size_t)handle + index;
    if (!at(handle) || i >= (size_t)count || lines[i].card != lines[(size_t)handle - 1].card) return NOT_FOUND;
    *part = (void *)(i + 1);
    return OK;
}
int nvmlEventSetCreate(void **set) { *set = (void *)1; return OK; }
int nvmlEventSetFree(void *set) { return set ? OK : INVALID; }
int nvmlDeviceRegisterEvents(void *handle, u64 types, void *set) { return types == 8 && set ? status(at(handle)) : UNSUPPORTED; }
int nvmlEventSetWait_v2(void *set, u64 *event, unsigned milliseconds) {
    void *handle;
    usleep(milliseconds * 1000);
    load();
    if (!set || !xid_number || nvmlDeviceGetHandleByIndex_v2(xid_index, &handle)) return TIMEOUT;
    event[0] = (u64)(size_t)handle;
    event[1] = 8;
    event[2] = xid_number;
    return OK;
}
